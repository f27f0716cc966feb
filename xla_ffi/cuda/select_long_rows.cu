// Rows that many blocks share. What one launch finds, the next one reads in the workspace:
//
//     for each digit:  count_chunks, a block a chunk;  narrow_rows, a block a row
//     of ties that are not all kept:  count_ties, a block a chunk;  find_ties, a block a row
//
// A row that is decided is not read again.
#include "cuda/digits.cuh"
#include "cuda/launch.cuh"

namespace sfpo {
namespace {

struct Workspace {
  Search search;
  uint32_t is_done;
  uint32_t bins[kMostBins];
};
static_assert(sizeof(Workspace) == kRowWords * sizeof(uint32_t), "another size is promised");

__device__ __forceinline__ Workspace* workspace_of(const SelectJob& job, int64_t row) {
  return reinterpret_cast<Workspace*>(job.workspace + row * (kRowWords + job.chunks));
}

// After it, the ties of each chunk.
__device__ __forceinline__ uint32_t* ties_of(const SelectJob& job, int64_t row) {
  return job.workspace + row * (kRowWords + job.chunks) + kRowWords;
}

// A chunk of a row, of which each table has one a block.
struct ChunkPlace {
  const SelectJob& job;
  int64_t row;
  uint32_t chunk;
  Workspace* workspace;

  __device__ __forceinline__ explicit ChunkPlace(const RowTable<SelectJob>& table)
      : ChunkPlace(table, find_row(table, blockIdx.x)) {}

  __device__ __forceinline__ Keys keys() const { return keys_of(job, row, chunk); }

  static __device__ __forceinline__ Keys keys_of(const SelectJob& job, int64_t row,
                                                 uint32_t chunk) {
    int64_t start = chunk * kRowChunk;
    int length = live_length(job.width, start, kRowChunk);
    return Keys(job, row * job.width + start, length);
  }

 private:
  __device__ __forceinline__ ChunkPlace(const RowTable<SelectJob>& table, RowPlace place)
      : job(table.jobs[place.job]) {
    uint32_t number = static_cast<uint32_t>(place.row);
    row = number / job.chunks;
    chunk = number % job.chunks;
    workspace = workspace_of(job, row);
  }
};

__global__ void __launch_bounds__(kBlockThreads)
    count_chunks(const __grid_constant__ RowTable<SelectJob> table, int pass) {
  __shared__ Bins bins;
  ChunkPlace place(table);
  Workspace* workspace = place.workspace;
  if (workspace->is_done != 0) return;
  if (kept_of(place.job, place.job.count[place.row]) != Kept::kSome) return;
  Digit digit(pass);
  bins.clear_by_block();
  bins.count_by_block(place.keys(), digit, pass == 0 ? 0 : workspace->search.prefix);
  for (int i = threadIdx.x; i < digit.bins(); i += kBlockThreads) {
    if (bins.at[i] != 0) atomicAdd(&workspace->bins[i], bins.at[i]);
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    narrow_rows(const __grid_constant__ RowTable<SelectJob> table, int pass) {
  RowPlace place = find_row(table, blockIdx.x);
  const SelectJob& job = table.jobs[place.job];
  Workspace* workspace = workspace_of(job, place.row);
  if (workspace->is_done != 0) return;
  Digit digit(pass);
  Search search = workspace->search;
  if (pass == 0) search = {0, job.count[place.row], 0};
  Kept kept = kept_of(job, job.count[place.row]);
  if (kept == Kept::kSome) {
    kept =
        narrow_by_block(&search, digit, pass == 0, [&](uint32_t i) { return workspace->bins[i]; });
  }
  __syncthreads();
  for (int i = threadIdx.x; i < digit.bins(); i += kBlockThreads) workspace->bins[i] = 0;
  if (threadIdx.x != 0) return;
  workspace->search = search;
  if (kept != Kept::kSome) {
    write_plain(job, place.row, kept);
    workspace->is_done = 1;
  } else if (pass + 1 >= (job.is_half ? kHalfPasses : kPasses) && search.missing == search.equal) {
    write_selection(job, place.row, search.prefix, static_cast<uint32_t>(job.width));
    workspace->is_done = 1;
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    count_ties(const __grid_constant__ RowTable<SelectJob> table) {
  __shared__ uint32_t total;
  ChunkPlace place(table);
  Workspace* workspace = place.workspace;
  if (workspace->is_done != 0) return;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  Keys keys = place.keys();
  int32_t key = static_cast<int32_t>(workspace->search.prefix);
  int own = 0;
#pragma unroll 4
  for (int entry = kQuad * threadIdx.x; entry < keys.length; entry += kQuad * kBlockThreads) {
    KeyQuad quad = keys.quad(entry);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) own += quad.at[j] == key;
  }
  own = __reduce_add_sync(kAllLanes, own);
  if (lane_id() == 0 && own > 0) atomicAdd(&total, static_cast<uint32_t>(own));
  __syncthreads();
  if (threadIdx.x == 0) ties_of(place.job, place.row)[place.chunk] = total;
}

__global__ void __launch_bounds__(kBlockThreads)
    find_ties(const __grid_constant__ RowTable<SelectJob> table) {
  RowPlace place = find_row(table, blockIdx.x);
  const SelectJob& job = table.jobs[place.job];
  Workspace* workspace = workspace_of(job, place.row);
  if (workspace->is_done != 0) return;
  Search search = workspace->search;
  const uint32_t* ties = ties_of(job, place.row);
  Located found =
      locate_by_block(search.missing + 1, job.chunks, [&](uint32_t i) { return ties[i]; });
  Keys keys = ChunkPlace::keys_of(job, place.row, found.item);
  uint32_t within =
      find_tie_by_block(keys, static_cast<int32_t>(search.prefix), search.missing - found.before);
  if (threadIdx.x != 0) return;
  uint32_t start = found.item * static_cast<uint32_t>(kRowChunk);
  write_selection(job, place.row, search.prefix, start + within);
}

// The same jobs, numbered by rows and not by chunks.
RowTable<SelectJob> by_rows(RowTable<SelectJob> table) {
  uint32_t end = 0;
  for (int i = 0; i < table.count; ++i) {
    end += table.jobs[i].rows;
    table.ends[i] = end;
  }
  return table;
}

}  // namespace

cudaError_t launch_long_rows(const RowTable<SelectJob>& table, cudaStream_t stream) {
  const RowTable<SelectJob> rows = by_rows(table);
  bool is_half = true;
  for (int i = 0; i < table.count; ++i) is_half = is_half && table.jobs[i].is_half;
  cudaError_t status = cudaSuccess;
  auto launch = [&](auto* kernel, const RowTable<SelectJob>& to, auto... arguments) {
    if (status != cudaSuccess) return;
    status = launch_blocks(kernel, to, kBlockThreads, stream, arguments...);
  };
  for (int pass = 0; pass < (is_half ? kHalfPasses : kPasses); ++pass) {
    launch(count_chunks, table, pass);
    launch(narrow_rows, rows, pass);
  }
  launch(count_ties, table);
  launch(find_ties, rows);
  return status;
}

}  // namespace sfpo
