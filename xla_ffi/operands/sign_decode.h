// sfpo_sign_decode: packed signs and scales to the leaves that they stand for.
//
// Operands  signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           variance[leaves]?: f32, any shapes
// Results   values[leaves]: f32, +-scale; 0 where there is a variance and it is not positive
#pragma once

#include "ffi_helpers.h"
#include "layout.h"

namespace sfpo {

struct SignDecode {
  Views<const uint8_t> signs;
  Views<const float> scales, variance;
  Views<float> values;
  Layout layout;
};

// All but the context that follows.
inline auto sign_decode_binding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<bool>("has_variance")
      .Attr<ffi::Span<const int64_t>>("pieces")
      .Attr<ffi::Span<const int64_t>>("widths");
}

// Checks what it is given, and has `run(executor, SignDecode)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const SignDecode&)>
ffi::Error sign_decode(ffi::RemainingArgs args, ffi::RemainingRets rets, bool has_variance,
                       ffi::Span<const int64_t> pieces, ffi::Span<const int64_t> widths,
                       Executor executor) {
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
  layout.require_all(values, &buffers);
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, {signs, scales, variance, values, layout});
}

}  // namespace sfpo
