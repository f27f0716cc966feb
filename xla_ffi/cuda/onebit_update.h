#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// Rows of one piece.
struct UpdateJob {
  const uint8_t* signs;
  const float* scales;
  const float* variance;
  const float* parameters;  // null: `out` gets the directions
  float* out;               // may be `parameters`
  float* momentum;          // null: not wanted
  int64_t length;           // entries from the first row on
  int32_t width;
  int32_t has_decay;
};

// `factors` are those of AdamFactors, on the device.
cudaError_t launch_onebit_update(const RowTable<UpdateJob>& table, const float* factors,
                                 cudaStream_t stream);

}  // namespace sfpo
