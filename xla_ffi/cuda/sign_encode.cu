#include "cuda/encoded_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/sign_encode.h"

namespace sfpo {
namespace {

// Which of four entries of a row count.
__device__ __forceinline__ uint32_t alive_of(const float* variance, const Quad& v, int entry,
                                             int length) {
  uint32_t alive = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    bool is_alive = entry + j < length && (variance == nullptr || v.at[j] > 0.0f);
    alive |= static_cast<uint32_t>(is_alive) << j;
  }
  return alive;
}

__global__ void __launch_bounds__(kThreads)
    encode_rows(const __grid_constant__ RowTable<EncodeJob> table, const float* b1,
                float relaxation) {
  __shared__ Tile tiles[kWarps];
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const EncodeJob& job = table.jobs[place.job];
  int width = job.width;
  int64_t start = place.row * width;
  int length = live_length(job.length, start, width);
  const float* x = job.x != nullptr ? job.x + start : nullptr;
  const float* momentum = job.momentum != nullptr ? job.momentum + start : nullptr;
  const float* error = job.error != nullptr ? job.error + start : nullptr;
  const float* variance = job.variance != nullptr ? job.variance + start : nullptr;
  float* new_error = job.new_error != nullptr ? job.new_error + start : nullptr;
  uint8_t* signs = job.signs + start / 8;
  uint8_t* live = job.live + start / 8;
  bool aligned = is_aligned(x, momentum, error, variance, new_error);
  float share = b1 != nullptr ? *b1 : 0.0f;
  float g_share = 1.0f - share;

  EncodedRow row(&tiles[warp_id()], new_error, length, width, aligned);
  for (int tile = 0; tile < width; tile += kTile) {
    int end = min(tile + kTile, width);
    for (int step = tile; step < end; step += kUnroll * kStep) {
      int first = step + kQuad * lane_id();
      Quad c[kUnroll], m[kUnroll], e[kUnroll], v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        c[u] = load_quad(x, first + u * kStep, length, aligned);
        m[u] = load_quad(momentum, first + u * kStep, length, aligned);
        e[u] = load_quad(error, first + u * kStep, length, aligned);
        v[u] = load_quad(variance, first + u * kStep, length, aligned);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int entry = first + u * kStep;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          float& sent = c[u].at[j];
          if (momentum != nullptr) sent = share * m[u].at[j] + g_share * sent;
          // Without errors -0.0 must stay what it is.
          if (error != nullptr) sent = sent + e[u].at[j];
        }
        uint32_t alive = alive_of(variance, v[u], entry, length);
        store_nibbles_of_warp(signs, entry, width, row.take(entry, c[u], alive));
        store_nibbles_of_warp(live, entry, width, alive);
      }
    }
    row.end_tile_of_warp(end - tile);
  }
  float scale = row.scale_of_warp(relaxation);
  if (lane_id() == 0) job.scales[place.row] = x != nullptr ? scale : 0.0f;
  row.write_lost(scale, [&](int entry) {
    return alive_of(variance, load_quad(variance, entry, length, aligned), entry, length);
  });
}

}  // namespace

cudaError_t launch_sign_encode(const RowTable<EncodeJob>& table, const float* b1, float relaxation,
                               cudaStream_t stream) {
  return launch_rows(encode_rows, table, stream, b1, relaxation);
}

}  // namespace sfpo
