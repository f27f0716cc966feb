#pragma once

#include "core/select.h"
#include "cuda/row_table.h"

namespace sfpo {

// Rows of up to so many entries are selected from by one warp, which keeps their keys in
// registers; longer ones by one block, which counts digits of their keys in shared memory;
// those that `is_long_row` says, by many blocks (core/select.h).
inline constexpr int64_t kTinyRow = 128;
inline constexpr int64_t kShortRow = 1024;

// Rows of one array; each pointer is at the first of them.
struct SelectJob {
  const void* x;  // float32, bfloat16 or float16
  const float* addend;
  const uint8_t* live;
  const uint32_t* count;
  uint32_t* threshold;
  uint32_t* end;
  uint32_t* workspace;  // of long rows
  int64_t width;
  uint32_t rows;
  uint32_t chunks;  // of each of the long rows
  bool is_half;
};

// A warp for each row; `is_tiny`: all have at most kTinyRow entries.
cudaError_t launch_short_rows(const RowTable<SelectJob>& table, bool is_tiny, cudaStream_t stream);

// A block for each row.
cudaError_t launch_block_rows(const RowTable<SelectJob>& table, cudaStream_t stream);

// A block for each chunk of each row, several times. Workspaces are zeros.
cudaError_t launch_long_rows(const RowTable<SelectJob>& table, cudaStream_t stream);

}  // namespace sfpo
