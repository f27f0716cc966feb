#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// Rows of one piece.
struct DecodeJob {
  const uint8_t* signs;
  const float* scales;
  const float* variance;  // null: all entries are live
  float* values;
  int64_t length;  // entries from the first row on
  int32_t width;
};

cudaError_t launch_sign_decode(const RowTable<DecodeJob>& table, cudaStream_t stream);

}  // namespace sfpo
