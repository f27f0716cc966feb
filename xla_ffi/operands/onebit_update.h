// sfpo_onebit_update: the packed momentum and the frozen variance to directions, or to new
// parameters in place.
//
// Operands  factors: f32[6]: 1 - b1^t, 1 - b2^W, eps, nu_floor, learning rate, weight decay
//           signs[groups]: u8[rows, width / 8], scales[groups]: f32[rows]
//           variance[leaves], parameters[leaves]?: f32, any shapes
// Results   out[leaves]: f32, directions, or new parameters (may be the operands' buffers)
//           momentum[leaves]?: f32, what the signs stand for
#pragma once

#include "core/adam.h"
#include "ffi_helpers.h"
#include "layout.h"

namespace sfpo {

struct OnebitUpdate {
  const float* factors;  // on the device, in the order of AdamFactors
  ffi::Span<const int64_t> is_decayed;
  Views<const uint8_t> signs;
  Views<const float> scales, variance, parameters;
  Views<float> out, momentum;
  Layout layout;
};

// All but the context that follows.
inline auto onebit_update_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::BufferR1<ffi::F32>>()  // factors
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("leaves")
      .Attr<bool>("has_parameters")
      .Attr<bool>("has_momentum")
      .Attr<ffi::Span<const int64_t>>("is_decayed")
      .Attr<ffi::Span<const int64_t>>("pieces")
      .Attr<ffi::Span<const int64_t>>("widths");
}

// Checks what it is given, and has `run(executor, OnebitUpdate)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const OnebitUpdate&)>
ffi::Error onebit_update(ffi::BufferR1<ffi::F32> factors, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, int64_t leaves, bool has_parameters,
                         bool has_momentum, ffi::Span<const int64_t> is_decayed,
                         ffi::Span<const int64_t> pieces, ffi::Span<const int64_t> widths,
                         Executor executor) {
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
  layout.require_all(out, &buffers);
  layout.require_bits("`signs` must have a bit for each entry", signs, 1, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, {factors.typed_data(), is_decayed, signs, scales, variance, parameters, out,
                        momentum, layout});
}

}  // namespace sfpo
