#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// A leaf, cut into rows of so many entries for a warp each.
inline constexpr int kSpan = 1024;

struct SparsifyJob {
  const float* x;
  const float* residual;  // null: none
  float* kept;
  float* dropped;  // null: none; may be `residual`
  int64_t length;
  int64_t leaf;
};

// What all leaves have in common, on the device.
struct SparsifyNumbers {
  const bool* is_on;
  const bool* is_new;
  // One of each leaf.
  const uint32_t* threshold;
  const uint32_t* end;
  uint32_t* count;  // zeros
};

cudaError_t launch_sparsify(const RowTable<SparsifyJob>& table, const SparsifyNumbers& numbers,
                            cudaStream_t stream);

}  // namespace sfpo
