// sfpo_onebit_update on a CUDA stream.
#include "cuda/onebit_update.h"

#include "cuda/handler.h"
#include "operands/onebit_update.h"

namespace sfpo {
namespace {

ffi::Error run(cudaStream_t stream, const OnebitUpdate& op) {
  RowLauncher<UpdateJob> launcher([&](const RowTable<UpdateJob>& table) {
    return launch_onebit_update(table, op.factors, stream);
  });
  SFPO_RETURN_IF_ERROR(
      for_each_chunk(op.layout, /*with_padding=*/false, [&](const Chunk& chunk, int32_t width) {
        int64_t leaf = chunk.piece->leaf;
        RowSpan rest = op.layout.rest(*chunk.piece, chunk.row);
        UpdateJob job = {};
        job.signs = at(op.signs, chunk.group, chunk.row * (width / 8));
        job.scales = at(op.scales, chunk.group, chunk.row);
        job.variance = at(op.variance, leaf, rest.start);
        job.parameters = at(op.parameters, leaf, rest.start);
        job.out = at(op.out, leaf, rest.start);
        job.momentum = at(op.momentum, leaf, rest.start);
        job.length = rest.length;
        job.width = width;
        job.has_decay = op.is_decayed[leaf] != 0;
        launcher.add(job, chunk.rows);
      }));
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_onebit_update, (onebit_update<cudaStream_t, run>),
                    onebit_update_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
