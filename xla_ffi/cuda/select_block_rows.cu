#include "cuda/digits.cuh"
#include "cuda/launch.cuh"

namespace sfpo {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    select_by_block(const __grid_constant__ RowTable<SelectJob> table) {
  __shared__ Bins bins;
  RowPlace place = find_row(table, blockIdx.x);
  const SelectJob& job = table.jobs[place.job];
  uint32_t width = static_cast<uint32_t>(job.width);
  Search search{0, job.count[place.row], 0};
  Kept kept = kept_of(job, search.missing);
  Keys keys(job, place.row * job.width, static_cast<int>(width));
  int passes = job.is_half ? kHalfPasses : kPasses;
#pragma unroll 1
  for (int pass = 0; pass < passes && kept == Kept::kSome; ++pass) {
    Digit digit(pass);
    bins.clear_by_block();
    bins.count_by_block(keys, digit, search.prefix);
    kept = narrow_by_block(&search, digit, pass == 0, [&](uint32_t i) { return bins.at[i]; });
  }
  if (kept != Kept::kSome) {
    if (threadIdx.x == 0) write_plain(job, place.row, kept);
    return;
  }
  uint32_t end = width;
  if (search.missing != search.equal) {
    end = find_tie_by_block(keys, static_cast<int32_t>(search.prefix), search.missing);
  }
  if (threadIdx.x == 0) write_selection(job, place.row, search.prefix, end);
}

}  // namespace

cudaError_t launch_block_rows(const RowTable<SelectJob>& table, cudaStream_t stream) {
  return launch_blocks(select_by_block, table, kBlockThreads, stream);
}

}  // namespace sfpo
