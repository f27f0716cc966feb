// sfpo_sign_serve on XLA's threads.
#include "operands/sign_serve.h"

#include "cpu/parallel.h"
#include "cpu/sign_rows.h"

namespace sfpo {
namespace {

ffi::Error run(ffi::ThreadPool pool, const SignServe& op) {
  std::vector<Chunk> chunks = op.layout.chunks(/*with_padding=*/true);
  parallel_for(pool, chunks.size(), op.layout.entries(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t group = chunk.group, width = op.layout.width(group);
    int64_t rows = op.new_scales[group].size;
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      int64_t byte = row * (width / 8);
      serve_row(op.signs[group].data + byte, op.scales[group].data + row, op.ranks, rows,
                op.live[group].data + byte, at(op.error, group, row * width), width, op.relaxation,
                op.new_signs[group].data + byte, op.new_scales[group].data + row,
                at(op.new_error, group, row * width));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_serve, (sign_serve<ffi::ThreadPool, run>),
                    sign_serve_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
