#include "core/adam.h"
#include "core/sign.h"
#include "cuda/launch.cuh"
#include "cuda/onebit_update.h"
#include "cuda/rows.cuh"

namespace sfpo {
namespace {

// The mean of a row's variance over its live entries. A row no wider than a tile is left
// there.
__device__ __forceinline__ float mean_of_warp(Tile* kept, const float* variance, int length,
                                              bool aligned) {
  RowSum sum;
  int alive = 0;
  for (int tile = 0; tile < length; tile += kTile) {
    int end = min(tile + kTile, length);
    for (int step = tile; step < end; step += kUnroll * kStep) {
      int first = step + kQuad * lane_id();
      Quad v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        v[u] = load_quad(variance, first + u * kStep, length, aligned);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        // A tile has a place for every quad that begins in it.
        if (first + u * kStep >= end) continue;
        store_quad(kept->at, first + u * kStep - tile, kTile, true, v[u]);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) alive += v[u].at[j] > 0.0f;
      }
    }
    sum.add_by_warp(*kept, end - tile, ~0u);
  }
  alive = __reduce_add_sync(kAllLanes, alive);
  return sum.total_of_warp() / static_cast<float>(alive > 0 ? alive : 1);
}

__global__ void __launch_bounds__(kThreads)
    update_rows(const __grid_constant__ RowTable<UpdateJob> table, const float* factors) {
  __shared__ Tile tiles[kWarps];
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const UpdateJob& job = table.jobs[place.job];
  int width = job.width;
  int64_t start = place.row * width;
  int length = live_length(job.length, start, width);
  const uint8_t* signs = job.signs + start / 8;
  const float* variance = job.variance + start;
  const float* parameters = job.parameters != nullptr ? job.parameters + start : nullptr;
  float* out = job.out + start;
  float* momentum = job.momentum != nullptr ? job.momentum + start : nullptr;
  bool aligned = is_aligned(variance, parameters, out, momentum);
  AdamFactors all{factors[0], factors[1], factors[2], factors[3], factors[4], factors[5]};
  float scale = job.scales[place.row];
  Tile* kept = &tiles[warp_id()];

  float least = all.nu_floor * mean_of_warp(kept, variance, length, aligned);
  float corrected = scale / all.m_correction;
  float decay = job.has_decay != 0 ? all.weight_decay : 0.0f;
  for (int entry = kQuad * lane_id(); entry < length; entry += kStep) {
    Quad p = load_quad(parameters, entry, length, aligned);
    uint32_t negative = load_nibble(signs, entry, width);
    bool is_kept = length <= kTile;
    Quad v = is_kept ? load_quad(kept->at, entry, kTile, true)
                     : load_quad(variance, entry, length, aligned);
    Quad result, m;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      uint32_t sign = as_sign(negative, j);
      float step =
          direction(signed_scale(corrected, sign), v.at[j], least, all.v_correction, all.eps);
      if (parameters != nullptr) {
        if (job.has_decay != 0) step = step + decay * p.at[j];
        step = p.at[j] - all.learning_rate * step;
      }
      result.at[j] = step;
      m.at[j] = v.at[j] > 0.0f ? signed_scale(scale, sign) : 0.0f;
    }
    store_quad(out, entry, length, aligned, result);
    if (momentum != nullptr) store_quad(momentum, entry, length, aligned, m);
  }
}

}  // namespace

cudaError_t launch_onebit_update(const RowTable<UpdateJob>& table, const float* factors,
                                 cudaStream_t stream) {
  return launch_rows(update_rows, table, stream, factors);
}

}  // namespace sfpo
