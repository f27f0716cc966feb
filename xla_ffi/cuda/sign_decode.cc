// sfpo_sign_decode on a CUDA stream.
#include "cuda/sign_decode.h"

#include "cuda/handler.h"
#include "operands/sign_decode.h"

namespace sfpo {
namespace {

ffi::Error run(cudaStream_t stream, const SignDecode& op) {
  RowLauncher<DecodeJob> launcher(
      [&](const RowTable<DecodeJob>& table) { return launch_sign_decode(table, stream); });
  SFPO_RETURN_IF_ERROR(
      for_each_chunk(op.layout, /*with_padding=*/false, [&](const Chunk& chunk, int32_t width) {
        int64_t leaf = chunk.piece->leaf;
        RowSpan rest = op.layout.rest(*chunk.piece, chunk.row);
        DecodeJob job = {};
        job.signs = at(op.signs, chunk.group, chunk.row * (width / 8));
        job.scales = at(op.scales, chunk.group, chunk.row);
        job.variance = at(op.variance, leaf, rest.start);
        job.values = at(op.values, leaf, rest.start);
        job.length = rest.length;
        job.width = width;
        launcher.add(job, chunk.rows);
      }));
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_decode, (sign_decode<cudaStream_t, run>),
                    sign_decode_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
