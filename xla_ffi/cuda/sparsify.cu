#include "core/select.h"
#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/sparsify.h"

namespace sfpo {
namespace {

// What the leaves' flags say, the same for all entries.
struct Mode {
  bool is_on, is_new, has_residual;
};

// Cuts four entries in two, in place: x to what is kept, the residual to what is not. Returns
// how many are kept, of those within `length`.
__device__ __forceinline__ int cut(Mode mode, uint32_t threshold, int ties, int entry, int length,
                                   Quad* x, Quad* residual) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    float s = mode.has_residual ? x->at[j] + residual->at[j] : x->at[j];
    int32_t key = static_cast<int32_t>(to_bits(s) & kKeyMask);
    bool is_kept = key > limit_of(threshold, entry + j < ties);
    if (mode.is_on) x->at[j] = is_kept ? s : 0.0f;
    if (mode.is_new) residual->at[j] = is_kept ? 0.0f : s;
    count += (is_kept || !mode.is_on) && entry + j < length;
  }
  return count;
}

// As many quads are read before the first is used.
constexpr int kAhead = 4;

__global__ void __launch_bounds__(kThreads)
    sparsify_rows(const __grid_constant__ RowTable<SparsifyJob> table, SparsifyNumbers numbers) {
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const SparsifyJob& job = table.jobs[place.job];
  int64_t start = place.row * kSpan;
  int length = live_length(job.length, start, kSpan);
  const float* x = job.x + start;
  const float* residual = job.residual != nullptr ? job.residual + start : nullptr;
  float* kept = job.kept + start;
  float* dropped = job.dropped != nullptr ? job.dropped + start : nullptr;
  bool aligned = is_aligned(x, residual, kept, dropped);
  Mode mode = {*numbers.is_on, *numbers.is_on && *numbers.is_new, residual != nullptr};
  bool is_written = dropped != nullptr && (mode.is_new || dropped != residual);
  uint32_t threshold = numbers.threshold[job.leaf];
  // Ties are kept before the end alone.
  int ties = live_length(numbers.end[job.leaf], start, kSpan);

  int count = 0;
  for (int step = 0; step < length; step += kAhead * kStep) {
    int first = step + kQuad * lane_id();
    Quad value[kAhead], held[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      value[u] = load_quad(x, first + u * kStep, length, aligned);
      held[u] = load_quad(residual, first + u * kStep, length, aligned);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      int entry = first + u * kStep;
      count += cut(mode, threshold, ties, entry, length, &value[u], &held[u]);
      store_quad(kept, entry, length, aligned, value[u]);
      if (is_written) store_quad(dropped, entry, length, aligned, held[u]);
    }
  }
  count = __reduce_add_sync(kAllLanes, count);
  if (lane_id() == 0) atomicAdd(numbers.count + job.leaf, static_cast<uint32_t>(count));
}

}  // namespace

cudaError_t launch_sparsify(const RowTable<SparsifyJob>& table, const SparsifyNumbers& numbers,
                            cudaStream_t stream) {
  return launch_rows(sparsify_rows, table, stream, numbers);
}

}  // namespace sfpo
