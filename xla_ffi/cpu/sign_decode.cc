// sfpo_sign_decode on XLA's threads.
#include "operands/sign_decode.h"

#include "cpu/parallel.h"
#include "cpu/sign_rows.h"

namespace sfpo {
namespace {

ffi::Error run(ffi::ThreadPool pool, const SignDecode& op) {
  std::vector<Chunk> chunks = op.layout.chunks(/*with_padding=*/false);
  parallel_for(pool, chunks.size(), op.layout.entries(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t leaf = chunk.piece->leaf, width = op.layout.width(chunk.group);
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = op.layout.span(*chunk.piece, row);
      decode_row(op.signs[chunk.group].data + row * (width / 8), op.scales[chunk.group].data[row],
                 at(op.variance, leaf, span.start), span.length, width,
                 op.values[leaf].data + span.start);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_decode, (sign_decode<ffi::ThreadPool, run>),
                    sign_decode_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
