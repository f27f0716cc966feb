// sfpo_sign_serve: everyone's rows to their mean, encoded, and the error that it leaves.
//
// Operands  signs[groups]: u8[ranks * rows, width / 8], scales[groups]: f32[ranks * rows]
//           live[groups]: u8[rows, width / 8], error[groups]?: f32[rows, width]
// Results   signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           error[groups]?: f32[rows, width]; may be the operands' buffers
#include "cpu/parallel.h"
#include "cpu/sign_rows.h"
#include "layout.h"

namespace sfpo {
namespace {

ffi::Error sign_serve(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      int64_t ranks, bool has_error, float relaxation,
                      ffi::Span<const int64_t> widths) {
  int64_t groups = widths.size();
  Buffers buffers(args, rets);
  auto signs = buffers.operands<uint8_t>("signs", groups);
  auto scales = buffers.operands<float>("scales", groups);
  auto live = buffers.operands<uint8_t>("live", groups);
  auto error = buffers.operands<float>("error", has_error ? groups : 0);
  auto new_signs = buffers.results<uint8_t>("signs", groups);
  auto new_scales = buffers.results<float>("scales", groups);
  auto new_error = buffers.results<float>("error", has_error ? groups : 0);
  buffers.require(ranks > 0, "`ranks` must be positive");
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("new signs", new_signs, live);
  buffers.require_sizes("new error", new_error, error);
  Layout layout({}, widths, error, new_scales, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  layout.require_bits("`live` must have a bit for each entry", live, 1, &buffers);
  layout.require_bits("`signs` must have a bit for each entry of each rank", signs, ranks,
                      &buffers);
  for (int64_t group = 0; group < groups; ++group) {
    int64_t rows = new_scales[group].size;
    buffers.require(scales[group].size == ranks * rows, "`scales` must have one a row and rank");
    buffers.require(!has_error || error[group].size == rows * widths[group],
                    "`error` must have the size of its rows");
  }
  SFPO_RETURN_IF_ERROR(buffers.error());

  std::vector<Chunk> chunks = layout.chunks(/*with_padding=*/true);
  parallel_for(pool, chunks.size(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t group = chunk.group, width = layout.width(group), rows = new_scales[group].size;
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      int64_t byte = row * (width / 8);
      serve_row(signs[group].data + byte, scales[group].data + row, ranks, rows,
                live[group].data + byte, has_error ? error[group].data + row * width : nullptr,
                width, relaxation, new_signs[group].data + byte, new_scales[group].data + row,
                has_error ? new_error[group].data + row * width : nullptr);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sign_serve, sign_serve,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::ThreadPool>()
                        .RemainingArgs()
                        .RemainingRets()
                        .Attr<int64_t>("ranks")
                        .Attr<bool>("has_error")
                        .Attr<float>("relaxation")
                        .Attr<ffi::Span<const int64_t>>("widths"));

}  // namespace sfpo
