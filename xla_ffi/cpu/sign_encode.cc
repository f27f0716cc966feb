// sfpo_sign_encode on XLA's threads.
#include "operands/sign_encode.h"

#include "cpu/parallel.h"
#include "cpu/sign_rows.h"

namespace sfpo {
namespace {

ffi::Error run(ffi::ThreadPool pool, const SignEncode& op) {
  float share = op.b1 != nullptr ? *op.b1 : 0.0f;
  Factors factors{share, 1.0f - share, op.relaxation};
  std::vector<Chunk> chunks = op.layout.chunks(/*with_padding=*/true);
  parallel_for(pool, chunks.size(), op.layout.entries(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t width = op.layout.width(chunk.group);
    uint8_t* signs = op.signs[chunk.group].data;
    uint8_t* live = op.live[chunk.group].data;
    float* scales = op.scales[chunk.group].data;
    if (chunk.piece == nullptr) {
      std::fill_n(signs + chunk.row * (width / 8), chunk.rows * (width / 8), uint8_t{0});
      std::fill_n(live + chunk.row * (width / 8), chunk.rows * (width / 8), uint8_t{0});
      std::fill_n(scales + chunk.row, chunk.rows, 0.0f);
      return;
    }
    int64_t leaf = chunk.piece->leaf;
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = op.layout.span(*chunk.piece, row);
      RowSource from{op.x[leaf].data + span.start};
      from.momentum = at(op.momentum, leaf, span.start);
      from.error = at(op.error, leaf, span.start);
      from.variance = at(op.variance, leaf, span.start);
      encode_row(from, span.length, width, factors, signs + row * (width / 8),
                 live + row * (width / 8), scales + row, at(op.new_error, leaf, span.start));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_encode, (sign_encode<ffi::ThreadPool, run>),
                    sign_encode_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
