#include "core/sign.h"
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/sign_decode.h"

namespace sfpo {
namespace {

__global__ void __launch_bounds__(kThreads)
    decode_rows(const __grid_constant__ RowTable<DecodeJob> table) {
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const DecodeJob& job = table.jobs[place.job];
  int width = job.width;
  int64_t start = place.row * width;
  int length = live_length(job.length, start, width);
  const uint8_t* signs = job.signs + start / 8;
  const float* variance = job.variance != nullptr ? job.variance + start : nullptr;
  float* values = job.values + start;
  bool aligned = is_aligned(variance, values);
  float scale = job.scales[place.row];

  for (int step = 0; step < length; step += kUnroll * kStep) {
    int first = step + kQuad * lane_id();
    uint32_t negative[kUnroll];
    Quad v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      negative[u] = load_nibble(signs, first + u * kStep, width);
      v[u] = load_quad(variance, first + u * kStep, length, aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Quad value;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        bool is_alive = variance == nullptr || v[u].at[j] > 0.0f;
        value.at[j] = is_alive ? signed_scale(scale, as_sign(negative[u], j)) : 0.0f;
      }
      store_quad(values, first + u * kStep, length, aligned, value);
    }
  }
}

}  // namespace

cudaError_t launch_sign_decode(const RowTable<DecodeJob>& table, cudaStream_t stream) {
  return launch_rows(decode_rows, table, stream);
}

}  // namespace sfpo
