// sfpo_sign_serve on a CUDA stream.
#include "cuda/sign_serve.h"

#include "cuda/handler.h"
#include "operands/sign_serve.h"

namespace sfpo {
namespace {

ffi::Error run(cudaStream_t stream, const SignServe& op) {
  RowLauncher<ServeJob> launcher([&](const RowTable<ServeJob>& table) {
    return launch_sign_serve(table, op.ranks, op.relaxation, stream);
  });
  SFPO_RETURN_IF_ERROR(
      for_each_chunk(op.layout, /*with_padding=*/true, [&](const Chunk& chunk, int32_t width) {
        int64_t group = chunk.group, byte = chunk.row * (width / 8);
        ServeJob job = {};
        job.signs = at(op.signs, group, byte);
        job.scales = at(op.scales, group, chunk.row);
        job.live = at(op.live, group, byte);
        job.error = at(op.error, group, chunk.row * width);
        job.new_signs = at(op.new_signs, group, byte);
        job.new_scales = at(op.new_scales, group, chunk.row);
        job.new_error = at(op.new_error, group, chunk.row * width);
        job.stride = op.new_scales[group].size;
        job.width = width;
        launcher.add(job, chunk.rows);
      }));
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_serve, (sign_serve<cudaStream_t, run>),
                    sign_serve_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
