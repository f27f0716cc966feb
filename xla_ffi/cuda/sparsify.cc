// sfpo_sparsify on a CUDA stream.
#include "cuda/sparsify.h"

#include "cuda/handler.h"
#include "operands/sparsify.h"

namespace sfpo {
namespace {

ffi::Error run(cudaStream_t stream, const Sparsify& op) {
  if (op.x.empty()) return ffi::Error::Success();
  cudaError_t status = cudaMemsetAsync(op.count, 0, op.x.size() * sizeof *op.count, stream);
  if (status != cudaSuccess) return to_error(status);
  SparsifyNumbers numbers{op.is_on, op.is_new, op.threshold, op.end, op.count};
  RowLauncher<SparsifyJob> launcher(
      [&](const RowTable<SparsifyJob>& table) { return launch_sparsify(table, numbers, stream); });
  for (size_t leaf = 0; leaf < op.x.size(); ++leaf) {
    SparsifyJob job = {};
    job.x = op.x[leaf].data;
    job.residual = at(op.residual, leaf, 0);
    job.kept = op.kept[leaf].data;
    job.dropped = at(op.dropped, leaf, 0);
    job.length = op.x[leaf].size;
    job.leaf = leaf;
    launcher.add(job, (job.length + kSpan - 1) / kSpan);
  }
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sparsify, (sparsify<cudaStream_t, run>), sparsify_binding().Ctx<Stream>(),
                    kTraits);

}  // namespace sfpo
