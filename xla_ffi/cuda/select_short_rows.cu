#include "cuda/launch.cuh"
#include "cuda/select_keys.cuh"

namespace sfpo {
namespace {

// The keys of a row, kQuads quads a lane.
template <int kQuads>
struct RowOfWarp {
  KeyQuad quads[kQuads];

  __device__ __forceinline__ explicit RowOfWarp(const Keys& keys) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) quads[q] = keys.quad(q * kStep + kQuad * lane_id());
  }

  // How many entries `test(key, entry)` holds for.
  template <typename Test>
  __device__ __forceinline__ uint32_t count_by_warp(const Test& test) const {
    int own = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        own += test(quads[q].at[j], q * kStep + kQuad * lane_id() + j);
      }
    }
    return __reduce_add_sync(kAllLanes, own);
  }
};

// Bit by bit, as the jnp twin does it.
template <int kQuads>
__global__ void __launch_bounds__(kThreads)
    select_short(const __grid_constant__ RowTable<SelectJob> table) {
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const SelectJob& job = table.jobs[place.job];
  int width = static_cast<int>(job.width);
  RowOfWarp<kQuads> row(Keys(job, place.row * width, width));
  uint32_t wanted = job.count[place.row];
  uint32_t live = row.count_by_warp([](int32_t key, int) { return key >= 0; });
  if (wanted == 0 || wanted >= live) {
    uint32_t threshold = wanted >= live ? 0 : kKeepNothing;
    if (lane_id() == 0) write_selection(job, place.row, threshold, width);
    return;
  }
  int32_t found = 0;
  for (int bit = 30; bit >= (job.is_half ? kHalfShift : 0); --bit) {
    int32_t candidate = found | 1 << bit;
    uint32_t reached = row.count_by_warp([=](int32_t key, int) { return key >= candidate; });
    if (reached >= wanted) found = candidate;
  }
  uint32_t missing = wanted - row.count_by_warp([=](int32_t key, int) { return key > found; });
  uint32_t equal = row.count_by_warp([=](int32_t key, int) { return key == found; });
  int end = width;
  if (missing != equal) {
    // As far as no more of them are before it: the place of the first that is left out.
    end = 0;
    for (int bit = kQuads * kStep / 2; bit > 0; bit /= 2) {
      int candidate = end | bit;
      uint32_t before = row.count_by_warp(
          [=](int32_t key, int entry) { return key == found && entry < candidate; });
      if (before <= missing) end = candidate;
    }
  }
  if (lane_id() == 0) write_selection(job, place.row, static_cast<uint32_t>(found), end);
}

}  // namespace

cudaError_t launch_short_rows(const RowTable<SelectJob>& table, bool is_tiny,
                              cudaStream_t stream) {
  auto* kernel = is_tiny ? select_short<kTinyRow / kStep> : select_short<kShortRow / kStep>;
  return launch_rows(kernel, table, stream);
}

}  // namespace sfpo
