// sfpo_magnitude_threshold on a CUDA stream.
#include "cuda/magnitude_threshold.h"

#include "cuda/handler.h"
#include "operands/magnitude_threshold.h"

namespace sfpo {
namespace {

// Jobs of each kind of row.
class Launchers {
 public:
  explicit Launchers(cudaStream_t stream)
      : tiny_([=](const Table& table) { return launch_short_rows(table, true, stream); }),
        short_([=](const Table& table) { return launch_short_rows(table, false, stream); }),
        block_([=](const Table& table) { return launch_block_rows(table, stream); }),
        long_([=](const Table& table) { return launch_long_rows(table, stream); }) {}

  // Rows of one array.
  void add(SelectJob job, int64_t rows) {
    int64_t chunks = row_chunks(job.width);
    int64_t most = kMaxRows / std::max<int64_t>(chunks, 1);
    for (int64_t step; rows > 0; rows -= step) {
      step = std::min(rows, most);
      job.rows = static_cast<uint32_t>(step);
      job.chunks = static_cast<uint32_t>(chunks);
      of(job.width).add(job, step * std::max<int64_t>(chunks, 1));
      job = rest(job, step);
    }
  }

  cudaError_t finish() {
    for (RowLauncher<SelectJob>* launcher : {&tiny_, &short_, &block_, &long_}) {
      cudaError_t status = launcher->finish();
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }

 private:
  using Table = RowTable<SelectJob>;

  RowLauncher<SelectJob>& of(int64_t width) {
    if (width <= kTinyRow) return tiny_;
    if (width <= kShortRow) return short_;
    return width <= kMostOfBlock ? block_ : long_;
  }

  // The rows after so many.
  static SelectJob rest(SelectJob job, int64_t rows) {
    int64_t entries = rows * job.width;
    job.x = static_cast<const char*>(job.x) + entries * (job.is_half ? 2 : 4);
    if (job.addend != nullptr) job.addend += entries;
    if (job.live != nullptr) job.live += entries;
    job.count += rows;
    job.threshold += rows;
    job.end += rows;
    job.workspace += rows * row_words(job.width);
    return job;
  }

  RowLauncher<SelectJob> tiny_, short_, block_, long_;
};

ffi::Error run(cudaStream_t stream, const MagnitudeThreshold& op) {
  if (op.workspace.size > 0) {
    size_t bytes = op.workspace.size * sizeof(uint32_t);
    cudaError_t status = cudaMemsetAsync(op.workspace.data, 0, bytes, stream);
    if (status != cudaSuccess) return to_error(status);
  }
  Launchers launchers(stream);
  int64_t row = 0;
  uint32_t* workspace = op.workspace.data;
  for (size_t i = 0; i < op.x.size(); ++i) {
    int64_t rows = op.rows[i];
    if (rows == 0) continue;
    SelectJob job = {};
    job.x = op.x[i].data;
    job.addend = at(op.addend, i, 0);
    job.live = reinterpret_cast<const uint8_t*>(at(op.live, i, 0));
    job.count = op.count + row;
    job.threshold = op.threshold + row;
    job.end = op.end + row;
    job.workspace = workspace;
    job.width = op.x[i].size / rows;
    job.is_half = op.x[i].dtype != ffi::F32;
    launchers.add(job, rows);
    row += rows;
    workspace += rows * row_words(job.width);
  }
  return to_error(launchers.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_magnitude_threshold, (magnitude_threshold<cudaStream_t, run>),
                    magnitude_threshold_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
