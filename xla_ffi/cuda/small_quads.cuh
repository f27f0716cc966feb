// Quads of narrower entries than float32: four at once where they are aligned.
#pragma once

#include <cstring>

#include "core/bfloat16.h"
#include "cuda/rows.cuh"

namespace sfpo {

template <typename T>
struct alignas(kQuad * sizeof(T)) QuadOf {
  T at[kQuad];
};

template <typename T>
__device__ __forceinline__ bool is_quad_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(QuadOf<T>) == 0;
}

// Four entries of a row of `length`, zeros beyond it.
template <typename T>
__device__ __forceinline__ QuadOf<T> load_quad_of(const T* row, int entry, int length) {
  if (is_quad_aligned(row + entry) && entry + kQuad <= length) {
    return *reinterpret_cast<const QuadOf<T>*>(row + entry);
  }
  QuadOf<T> quad = {};
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (entry + j < length) quad.at[j] = row[entry + j];
  }
  return quad;
}

template <typename T>
__device__ __forceinline__ void store_quad_of(T* row, int entry, int length,
                                              const QuadOf<T>& quad) {
  if (is_quad_aligned(row + entry) && entry + kQuad <= length) {
    *reinterpret_cast<QuadOf<T>*>(row + entry) = quad;
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (entry + j < length) row[entry + j] = quad.at[j];
  }
}

}  // namespace sfpo
