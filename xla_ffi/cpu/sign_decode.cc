// sfpo_sign_decode: packed signs and scales to the leaves that they stand for.
//
// Operands  signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           variance[leaves]?: f32, any shapes
// Results   values[leaves]: f32, +-scale; 0 where there is a variance and it is not positive
#include "cpu/parallel.h"
#include "cpu/sign_rows.h"
#include "layout.h"

namespace sfpo {
namespace {

ffi::Error sign_decode(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       bool has_variance, ffi::Span<const int64_t> pieces,
                       ffi::Span<const int64_t> widths) {
  int64_t groups = widths.size(), leaves = rets.size();
  Buffers buffers(args, rets);
  auto signs = buffers.operands<uint8_t>("signs", groups);
  auto scales = buffers.operands<float>("scales", groups);
  auto variance = buffers.operands<float>("variance", has_variance ? leaves : 0);
  auto values = buffers.results<float>("values", leaves);
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("variance", variance, values);
  Layout layout(pieces, widths, values, scales, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());

  std::vector<Chunk> chunks = layout.chunks(/*with_padding=*/false);
  parallel_for(pool, chunks.size(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t leaf = chunk.piece->leaf, width = layout.width(chunk.group);
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = layout.span(*chunk.piece, row);
      decode_row(signs[chunk.group].data + row * (width / 8), scales[chunk.group].data[row],
                 has_variance ? variance[leaf].data + span.start : nullptr, span.length, width,
                 values[leaf].data + span.start);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_decode, sign_decode,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::ThreadPool>()
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<bool>("has_variance")
                        .Attr<ffi::Span<const int64_t>>("pieces")
                        .Attr<ffi::Span<const int64_t>>("widths"));

}  // namespace sfpo
