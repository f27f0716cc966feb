#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// Rows of one piece; null for what is not there. Without `x` they are padding.
struct EncodeJob {
  const float* x;
  const float* momentum;
  const float* error;
  const float* variance;
  float* new_error;  // may be `error`
  uint8_t* signs;
  uint8_t* live;
  float* scales;
  int64_t length;  // entries from the first row on; 0 for padding
  int32_t width;
};

// `b1` is on the device; null without momentum.
cudaError_t launch_sign_encode(const RowTable<EncodeJob>& table, const float* b1, float relaxation,
                               cudaStream_t stream);

}  // namespace sfpo
