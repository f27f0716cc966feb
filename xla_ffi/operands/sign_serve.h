// sfpo_sign_serve: everyone's rows to their mean, encoded, and the error that it leaves.
//
// Operands  signs[groups]: u8[ranks * rows, width / 8], scales[groups]: f32[ranks * rows]
//           live[groups]: u8[rows, width / 8], error[groups]?: f32[rows, width]
// Results   signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           error[groups]?: f32[rows, width]; may be the operands' buffers
#pragma once

#include "ffi_helpers.h"
#include "layout.h"

namespace sfpo {

struct SignServe {
  int64_t ranks;
  float relaxation;
  Views<const uint8_t> signs;
  Views<const float> scales;
  Views<const uint8_t> live;
  Views<const float> error;
  Views<uint8_t> new_signs;
  Views<float> new_scales, new_error;
  Layout layout;  // of the groups; there are no pieces
};

// All but the context that follows.
inline auto sign_serve_binding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("ranks")
      .Attr<bool>("has_error")
      .Attr<float>("relaxation")
      .Attr<ffi::Span<const int64_t>>("widths");
}

// Checks what it is given, and has `run(executor, SignServe)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const SignServe&)>
ffi::Error sign_serve(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t ranks,
                      bool has_error, float relaxation, ffi::Span<const int64_t> widths,
                      Executor executor) {
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
  SFPO_RETURN_IF_ERROR(buffers.error());
  layout.require_bits("`live` must have a bit for each entry", live, 1, &buffers);
  layout.require_bits("`signs` must have a bit for each entry of each rank", signs, ranks,
                      &buffers);
  for (int64_t group = 0; group < groups; ++group) {
    int64_t rows = new_scales[group].size;
    buffers.require(is_product(scales[group].size, {ranks, rows}),
                    "`scales` must have one a row and rank");
    buffers.require(!has_error || is_product(error[group].size, {rows, widths[group]}),
                    "`error` must have the size of its rows");
  }
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, {ranks, relaxation, signs, scales, live, error, new_signs, new_scales,
                        new_error, layout});
}

}  // namespace sfpo
