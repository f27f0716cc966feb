// sfpo_magnitude_threshold: the k largest magnitudes of each row of each array.
//
// Operands  count: u32[rows of all arrays], entries to keep of each row
//           x[arrays]: f32, bf16 or f16, any shapes of rows[i] rows each
//           addend[arrays]?: f32 as x, which must be f32 too; what is selected from is the sum
//           live[arrays]?: pred, as x; entries that may be kept
// Results   threshold, end: u32[rows of all arrays]
//           workspace: u32[row_words(width) of each row of all arrays], for GPUs alone; its
//             contents mean nothing. Scratch memory would be another's by the time that a
//             recorded launch is replayed.
//
// Kept is a live entry i of a row whose magnitude bits are above the row's threshold, or equal
// to it while i is below the row's end: min(count, live entries) of them.
#pragma once

#include <algorithm>

#include "core/select.h"
#include "ffi_helpers.h"

namespace sfpo {

struct MagnitudeThreshold {
  const uint32_t* count;  // on the device
  ffi::Span<const int64_t> rows;
  std::vector<UntypedView> x;
  Views<const float> addend;
  Views<const bool> live;
  uint32_t* threshold;
  uint32_t* end;
  View<uint32_t> workspace;
};

// All but the context that follows.
inline auto magnitude_threshold_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::BufferR1<ffi::U32>>()  // count
      .RemainingArgs()
      .RemainingRets()
      .Attr<bool>("has_addend")
      .Attr<bool>("has_live")
      .Attr<ffi::Span<const int64_t>>("rows");
}

// Checks what it is given, and has `run(executor, MagnitudeThreshold)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const MagnitudeThreshold&)>
ffi::Error magnitude_threshold(ffi::BufferR1<ffi::U32> count, ffi::RemainingArgs args,
                               ffi::RemainingRets rets, bool has_addend, bool has_live,
                               ffi::Span<const int64_t> rows, Executor executor) {
  int64_t arrays = rows.size(), total = 0, words = 0;
  Buffers buffers(args, rets);
  auto x = buffers.untyped_operands("x", arrays);
  auto addend = buffers.operands<float>("addend", has_addend ? arrays : 0);
  auto live = buffers.operands<bool>("live", has_live ? arrays : 0);
  auto out = buffers.results<uint32_t>("out", 3);
  SFPO_RETURN_IF_ERROR(buffers.error());
  buffers.require_sizes("addend", addend, x);
  buffers.require_sizes("live", live, x);
  for (int64_t i = 0; i < arrays; ++i) {
    bool is_single = x[i].dtype == ffi::F32;
    bool is_half = x[i].dtype == ffi::BF16 || x[i].dtype == ffi::F16;
    buffers.require(is_single || (is_half && !has_addend), "`x` has a wrong dtype");
    bool is_cut = rows[i] > 0 ? x[i].size % rows[i] == 0 : rows[i] == 0 && x[i].size == 0;
    buffers.require(is_cut, "`rows` must divide the arrays");
    // Any number divides an array without entries.
    bool is_counted = rows[i] <= static_cast<int64_t>(count.element_count()) - total;
    buffers.require(is_counted, "`count` and the results must have one number a row");
    SFPO_RETURN_IF_ERROR(buffers.error());
    int64_t width = x[i].size / std::max<int64_t>(rows[i], 1);
    buffers.require(width <= int64_t{0xffffffff}, "a row has 2^32 entries or more");
    total += rows[i];
    words += rows[i] * row_words(width);
  }
  int64_t counts = count.element_count();
  buffers.require(counts == total && out[0].size == total && out[1].size == total,
                  "`count` and the results must have one number a row");
  buffers.require(out[2].size == words, "the workspace has a wrong size");
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor,
             {count.typed_data(), rows, x, addend, live, out[0].data, out[1].data, out[2]});
}

}  // namespace sfpo
