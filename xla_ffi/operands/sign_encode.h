// sfpo_sign_encode: leaves to packed signs, scales and new errors.
//
// Operands  b1: f32[], the share of the momentum; read where there is one
//           x[leaves], momentum[leaves]?, error[leaves]?, variance[leaves]?: f32, any shapes
// Results   signs[groups]: u8[rows, width / 8], live[groups]: likewise, scales[groups]: f32[rows]
//           error[leaves]?: f32; may be the operands' buffers
#pragma once

#include "ffi_helpers.h"
#include "layout.h"

namespace sfpo {

struct SignEncode {
  const float* b1;  // on the device; null without momentum
  float relaxation;
  Views<const float> x, momentum, error, variance;
  Views<uint8_t> signs, live;
  Views<float> scales, new_error;
  Layout layout;
};

// All but the context that follows.
inline auto sign_encode_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::BufferR0<ffi::F32>>()  // b1
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("leaves")
      .Attr<bool>("has_momentum")
      .Attr<bool>("has_error")
      .Attr<bool>("has_variance")
      .Attr<float>("relaxation")
      .Attr<ffi::Span<const int64_t>>("pieces")
      .Attr<ffi::Span<const int64_t>>("widths");
}

// Checks what it is given, and has `run(executor, SignEncode)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const SignEncode&)>
ffi::Error sign_encode(ffi::BufferR0<ffi::F32> b1, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, int64_t leaves, bool has_momentum, bool has_error,
                       bool has_variance, float relaxation, ffi::Span<const int64_t> pieces,
                       ffi::Span<const int64_t> widths, Executor executor) {
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
  layout.require_all(x, &buffers);
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  layout.require_bits("`live` must have a bit for each entry", live, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, {has_momentum ? b1.typed_data() : nullptr, relaxation, x, momentum, error,
                        variance, signs, live, scales, new_error, layout});
}

}  // namespace sfpo
