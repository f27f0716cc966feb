#include "cuda/encoded_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/sign_serve.h"

namespace sfpo {
namespace {

// The sum over ranks, in their order, of what four entries of a row stand for.
__device__ __forceinline__ Quad sum_of_ranks(const ServeJob& job, int64_t row, int64_t ranks,
                                             int entry) {
  int64_t bytes = job.width / 8;
  const uint8_t* bits = job.signs + row * bytes;
  const float* scale = job.scales + row;
  Quad sum = {};
#pragma unroll 4
  for (int64_t rank = 0; rank < ranks; ++rank) {
    uint32_t negative = load_nibble(bits, entry, job.width);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      sum.at[j] += signed_scale(*scale, as_sign(negative, j));
    }
    bits += job.stride * bytes;
    scale += job.stride;
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    serve_rows(const __grid_constant__ RowTable<ServeJob> table, int64_t ranks, float relaxation) {
  __shared__ Tile tiles[kWarps];
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const ServeJob& job = table.jobs[place.job];
  int width = job.width;
  int64_t start = place.row * width;
  const uint8_t* live = job.live + start / 8;
  uint8_t* new_signs = job.new_signs + start / 8;
  const float* error = job.error != nullptr ? job.error + start : nullptr;
  float* new_error = job.new_error != nullptr ? job.new_error + start : nullptr;
  bool aligned = is_aligned(error, new_error);
  float share = 1.0f / static_cast<float>(ranks);

  EncodedRow row(&tiles[warp_id()], new_error, width, width, aligned);
  for (int tile = 0; tile < width; tile += kTile) {
    int end = min(tile + kTile, width);
    for (int step = tile; step < end; step += kStep) {
      int entry = step + kQuad * lane_id();
      Quad e = load_quad(error, entry, width, aligned);
      uint32_t alive = load_nibble(live, entry, width);
      Quad c = sum_of_ranks(job, place.row, ranks, entry);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        c.at[j] = (alive >> j & 1) != 0 ? c.at[j] * share : 0.0f;
        if (error != nullptr) c.at[j] = c.at[j] + e.at[j];
      }
      store_nibbles_of_warp(new_signs, entry, width, row.take(entry, c, alive));
    }
    row.end_tile_of_warp(end - tile);
  }
  float scale = row.scale_of_warp(relaxation);
  if (lane_id() == 0) job.new_scales[place.row] = scale;
  row.write_lost(scale, [&](int entry) { return load_nibble(live, entry, width); });
}

}  // namespace

cudaError_t launch_sign_serve(const RowTable<ServeJob>& table, int64_t ranks, float relaxation,
                              cudaStream_t stream) {
  return launch_rows(serve_rows, table, stream, ranks, relaxation);
}

}  // namespace sfpo
