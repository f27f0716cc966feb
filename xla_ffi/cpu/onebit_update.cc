// sfpo_onebit_update: the packed momentum and the frozen variance to directions, or to new
// parameters in place.
//
// Operands  factors: f32[6]: 1 - b1^t, 1 - b2^W, eps, nu_floor, learning rate, weight decay
//           signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           variance[leaves], parameters[leaves]?: f32, any shapes
// Results   out[leaves]: f32, directions, or new parameters (may be the operands' buffers)
//           momentum[leaves]?: f32, what the signs stand for
#include "cpu/adam_rows.h"
#include "cpu/parallel.h"
#include "layout.h"

namespace sfpo {
namespace {

ffi::Error onebit_update(ffi::ThreadPool pool, ffi::BufferR1<ffi::F32> factors,
                         ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t leaves,
                         bool has_parameters, bool has_momentum,
                         ffi::Span<const int64_t> is_decayed, ffi::Span<const int64_t> pieces,
                         ffi::Span<const int64_t> widths) {
  int64_t groups = widths.size();
  Buffers buffers(args, rets);
  auto signs = buffers.operands<uint8_t>("signs", groups);
  auto scales = buffers.operands<float>("scales", groups);
  auto variance = buffers.operands<float>("variance", leaves);
  auto parameters = buffers.operands<float>("parameters", has_parameters ? leaves : 0);
  auto out = buffers.results<float>("out", leaves);
  auto momentum = buffers.results<float>("momentum", has_momentum ? leaves : 0);
  buffers.require(factors.element_count() == 6, "`factors` must be six numbers");
  buffers.require(static_cast<int64_t>(is_decayed.size()) == leaves,
                  "`is_decayed` must have one of each leaf");
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("variance", variance, out);
  buffers.require_sizes("parameters", parameters, out);
  buffers.require_sizes("momentum", momentum, out);
  Layout layout(pieces, widths, out, scales, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());

  const float* f = factors.typed_data();
  AdamFactors all{f[0], f[1], f[2], f[3], f[4], f[5]};
  std::vector<Chunk> chunks = layout.chunks(/*with_padding=*/false);
  parallel_for(pool, chunks.size(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t leaf = chunk.piece->leaf, width = layout.width(chunk.group);
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = layout.span(*chunk.piece, row);
      onebit_row(signs[chunk.group].data + row * (width / 8), scales[chunk.group].data[row],
                 variance[leaf].data + span.start,
                 has_parameters ? parameters[leaf].data + span.start : nullptr,
                 is_decayed[leaf] != 0, span.length, width, all, out[leaf].data + span.start,
                 has_momentum ? momentum[leaf].data + span.start : nullptr);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_onebit_update, onebit_update,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::ThreadPool>()
                        .Arg<ffi::BufferR1<ffi::F32>>()  // factors
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<int64_t>("leaves")
                        .Attr<bool>("has_parameters")
                        .Attr<bool>("has_momentum")
                        .Attr<ffi::Span<const int64_t>>("is_decayed")
                        .Attr<ffi::Span<const int64_t>>("pieces")
                        .Attr<ffi::Span<const int64_t>>("widths"));

}  // namespace sfpo
