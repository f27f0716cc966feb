// sfpo_sign_encode on a CUDA stream.
#include "cuda/sign_encode.h"

#include "cuda/handler.h"
#include "operands/sign_encode.h"

namespace sfpo {
namespace {

ffi::Error run(cudaStream_t stream, const SignEncode& op) {
  RowLauncher<EncodeJob> launcher([&](const RowTable<EncodeJob>& table) {
    return launch_sign_encode(table, op.b1, op.relaxation, stream);
  });
  SFPO_RETURN_IF_ERROR(
      for_each_chunk(op.layout, /*with_padding=*/true, [&](const Chunk& chunk, int32_t width) {
        EncodeJob job = {};
        if (chunk.piece != nullptr) {
          int64_t leaf = chunk.piece->leaf;
          RowSpan rest = op.layout.rest(*chunk.piece, chunk.row);
          job.x = at(op.x, leaf, rest.start);
          job.momentum = at(op.momentum, leaf, rest.start);
          job.error = at(op.error, leaf, rest.start);
          job.variance = at(op.variance, leaf, rest.start);
          job.new_error = at(op.new_error, leaf, rest.start);
          job.length = rest.length;
        }
        job.signs = at(op.signs, chunk.group, chunk.row * (width / 8));
        job.live = at(op.live, chunk.group, chunk.row * (width / 8));
        job.scales = at(op.scales, chunk.group, chunk.row);
        job.width = width;
        launcher.add(job, chunk.rows);
      }));
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_encode, (sign_encode<cudaStream_t, run>),
                    sign_encode_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
