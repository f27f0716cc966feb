// sfpo_sign_encode: leaves to packed signs, scales and new errors.
//
// Operands  b1: f32[], the share of the momentum; read where there is one
//           x[leaves], momentum[leaves]?, error[leaves]?, variance[leaves]?: f32, any shapes
// Results   signs[groups]: u8[rows, width / 8], live[groups]: likewise, scales[groups]: f32[rows]
//           error[leaves]?: f32; may be the operands' buffers
#include "cpu/parallel.h"
#include "cpu/sign_rows.h"
#include "layout.h"

namespace sfpo {
namespace {

ffi::Error sign_encode(ffi::ThreadPool pool, ffi::BufferR0<ffi::F32> b1, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t leaves, bool has_momentum, bool has_error,
                       bool has_variance, float relaxation, ffi::Span<const int64_t> pieces,
                       ffi::Span<const int64_t> widths) {
  int64_t groups = widths.size();
  Buffers buffers(args, rets);
  auto x = buffers.operands<float>("x", leaves);
  auto momentum = buffers.operands<float>("momentum", has_momentum ? leaves : 0);
  auto error = buffers.operands<float>("error", has_error ? leaves : 0);
  auto variance = buffers.operands<float>("variance", has_variance ? leaves : 0);
  auto signs = buffers.results<uint8_t>("signs", groups);
  auto live = buffers.results<uint8_t>("live", groups);
  auto scales = buffers.results<float>("scales", groups);
  auto new_error = buffers.results<float>("error", has_error ? leaves : 0);
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("momentum", momentum, x);
  buffers.require_sizes("error", error, x);
  buffers.require_sizes("variance", variance, x);
  buffers.require_sizes("new error", new_error, x);
  Layout layout(pieces, widths, x, scales, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  layout.require_bits("`live` must have a bit for each entry", live, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());

  float share = has_momentum ? *b1.typed_data() : 0.0f;
  Factors factors{share, 1.0f - share, relaxation};
  std::vector<Chunk> chunks = layout.chunks(/*with_padding=*/true);
  parallel_for(pool, chunks.size(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t width = layout.width(chunk.group);
    uint8_t* sign_bytes = signs[chunk.group].data;
    uint8_t* live_bytes = live[chunk.group].data;
    float* row_scales = scales[chunk.group].data;
    if (chunk.piece == nullptr) {
      std::fill_n(sign_bytes + chunk.row * (width / 8), chunk.rows * (width / 8), uint8_t{0});
      std::fill_n(live_bytes + chunk.row * (width / 8), chunk.rows * (width / 8), uint8_t{0});
      std::fill_n(row_scales + chunk.row, chunk.rows, 0.0f);
      return;
    }
    int64_t leaf = chunk.piece->leaf;
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = layout.span(*chunk.piece, row);
      RowSource from{x[leaf].data + span.start};
      if (has_momentum) from.momentum = momentum[leaf].data + span.start;
      if (has_error) from.error = error[leaf].data + span.start;
      if (has_variance) from.variance = variance[leaf].data + span.start;
      float* lost = has_error ? new_error[leaf].data + span.start : nullptr;
      encode_row(from, span.length, width, factors, sign_bytes + row * (width / 8),
                 live_bytes + row * (width / 8), row_scales + row, lost);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_encode, sign_encode,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::ThreadPool>()
                        .Arg<ffi::BufferR0<ffi::F32>>()  // b1
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<int64_t>("leaves")
                        .Attr<bool>("has_momentum")
                        .Attr<bool>("has_error")
                        .Attr<bool>("has_variance")
                        .Attr<float>("relaxation")
                        .Attr<ffi::Span<const int64_t>>("pieces")
                        .Attr<ffi::Span<const int64_t>>("widths"));

}  // namespace sfpo
