#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// Rows of one group; each pointer is at the first of them, `signs` and `scales` of the first
// rank.
struct ServeJob {
  const uint8_t* signs;
  const float* scales;
  const uint8_t* live;
  const float* error;  // null without error feedback
  uint8_t* new_signs;
  float* new_scales;
  float* new_error;  // may be `error`
  int64_t stride;    // rows from one rank to the next
  int32_t width;
};

cudaError_t launch_sign_serve(const RowTable<ServeJob>& table, int64_t ranks, float relaxation,
                              cudaStream_t stream);

}  // namespace sfpo
