// sfpo_sparsify: leaves cut in two by their thresholds, in one pass.
//
// Operands  is_on: pred[]; false: x passes as it is and the residual stays
//           is_new: pred[]; false: the residual stays
//           threshold, end: u32[leaves], as sfpo_magnitude_threshold gives them
//           x[leaves], residual[leaves]?: f32, any shapes
// Results   count: u32[leaves], entries kept of each
//           kept[leaves]: f32, x + residual where selected, else 0
//           residual[leaves]?: f32, x + residual where not, else 0; may be the operands' buffers
#pragma once

#include "ffi_helpers.h"

namespace sfpo {

struct Sparsify {
  // On the device.
  const bool* is_on;
  const bool* is_new;
  const uint32_t* threshold;
  const uint32_t* end;
  Views<const float> x, residual;
  uint32_t* count;
  Views<float> kept, dropped;
};

// All but the context that follows.
inline auto sparsify_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::BufferR0<ffi::PRED>>()  // is_on
      .Arg<ffi::BufferR0<ffi::PRED>>()  // is_new
      .Arg<ffi::BufferR1<ffi::U32>>()   // threshold
      .Arg<ffi::BufferR1<ffi::U32>>()   // end
      .RemainingArgs()
      .RemainingRets()
      .Attr<bool>("has_residual");
}

// Checks what it is given, and has `run(executor, Sparsify)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const Sparsify&)>
ffi::Error sparsify(ffi::BufferR0<ffi::PRED> is_on, ffi::BufferR0<ffi::PRED> is_new,
                    ffi::BufferR1<ffi::U32> threshold, ffi::BufferR1<ffi::U32> end,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, bool has_residual,
                    Executor executor) {
  int64_t leaves = threshold.element_count(), residuals = has_residual ? leaves : 0;
  Buffers buffers(args, rets);
  auto x = buffers.operands<float>("x", leaves);
  auto residual = buffers.operands<float>("residual", residuals);
  auto count = buffers.results<uint32_t>("count", 1);
  auto kept = buffers.results<float>("kept", leaves);
  auto dropped = buffers.results<float>("residual", residuals);
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("residual", residual, x);
  buffers.require_sizes("kept", kept, x);
  buffers.require_sizes("new residual", dropped, x);
  int64_t ends = end.element_count();
  buffers.require(ends == leaves && count[0].size == leaves,
                  "`end` and `count` must have one number a leaf");
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, {is_on.typed_data(), is_new.typed_data(), threshold.typed_data(),
                        end.typed_data(), x, residual, count[0].data, kept, dropped});
}

}  // namespace sfpo
