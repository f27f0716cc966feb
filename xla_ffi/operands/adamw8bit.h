// sfpo_adamw8bit: AdamW over moments of one byte an entry, for any number of leaves.
//
// Operands  numbers: f32[8]: b1, 1 - b1, b2, 1 - b2, sqrt(1 - b2^t) / (1 - b1^t),
//             eps sqrt(1 - b2^t), learning rate, weight decay; the last two are for parameters
//           seeds: u32[2], of v's rounding, and two more a leaf where `is_stochastic`
//           taken: pred[]; false: moments and parameters stay, directions are zero
//           g[leaves]: f32, rows of widths[leaf] entries in blocks of blocks[leaf], the last
//             block of a row may be shorter
//           m[leaves]: s8, m_scales[leaves]: f32, v[leaves]: u8, v_scales[leaves]: f32
//           parameters[leaves]?: f32, of the last `narrow` leaves bf16
// Results   m[leaves], m_scales[leaves], v[leaves], v_scales[leaves]; then
//           parameters[leaves], or directions[leaves]: f32 where there are none
// Results may be the operands' buffers, directions those of g.
#pragma once

#include <algorithm>

#include "core/adamw8bit.h"
#include "core/bfloat16.h"
#include "ffi_helpers.h"

namespace sfpo {

template <>
inline constexpr ffi::DataType kDataType<BFloat16> = ffi::BF16;

// What an operation reads and what it makes of it.
template <typename T>
struct Changed {
  Views<const T> from;
  Views<T> to;
};

// A leaf's blocks: `in_row` of each row, numbered row by row.
struct Blocks {
  int64_t width;
  int64_t block;
  int64_t in_row;
  int64_t count;

  int64_t start(int64_t i) const { return i / in_row * width + i % in_row * block; }
  int64_t length(int64_t i) const { return std::min(block, width - i % in_row * block); }
};

struct Adamw8bit {
  // On the device; `numbers` are in the order of AdamwNumbers.
  const float* numbers;
  const uint32_t* seeds;
  const bool* taken;
  bool has_parameters;
  bool is_stochastic;
  int64_t first_narrow;  // the first leaf whose parameters are bfloat16
  ffi::Span<const int64_t> is_decayed;
  Views<const float> g;
  Changed<int8_t> m;
  Changed<float> m_scales;
  Changed<uint8_t> v;
  Changed<float> v_scales;
  Changed<float> wide;
  Changed<BFloat16> narrow;  // of `first_narrow` and those after it
  Views<float> directions;   // none where there are parameters
  std::vector<Blocks> blocks;

  // Of a leaf, for rounding at random; null to round to nearest.
  const uint32_t* rounding(int64_t leaf) const {
    return is_stochastic ? seeds + 2 + 2 * leaf : nullptr;
  }

  void take(Buffers* buffers, int64_t leaves) {
    int64_t narrows = leaves - first_narrow, wides = has_parameters ? first_narrow : 0;
    g = buffers->operands<float>("g", leaves);
    m.from = buffers->operands<int8_t>("m", leaves);
    m_scales.from = buffers->operands<float>("m_scales", leaves);
    v.from = buffers->operands<uint8_t>("v", leaves);
    v_scales.from = buffers->operands<float>("v_scales", leaves);
    wide.from = buffers->operands<float>("parameters", wides);
    narrow.from = buffers->operands<BFloat16>("bfloat16 parameters", narrows);
    m.to = buffers->results<int8_t>("m", leaves);
    m_scales.to = buffers->results<float>("m_scales", leaves);
    v.to = buffers->results<uint8_t>("v", leaves);
    v_scales.to = buffers->results<float>("v_scales", leaves);
    wide.to = buffers->results<float>("parameters", wides);
    narrow.to = buffers->results<BFloat16>("bfloat16 parameters", narrows);
    directions = buffers->results<float>("directions", has_parameters ? 0 : leaves);
  }

  // Requires that everything has the size that the first of its leaf has.
  void check(ffi::Span<const int64_t> widths, ffi::Span<const int64_t> sizes, Buffers* buffers) {
    buffers->require(widths.size() == g.size() && sizes.size() == g.size(),
                     "`widths` and `blocks` must have one of each leaf");
    if (widths.size() != g.size() || sizes.size() != g.size()) return;
    std::vector<View<float>> scales;
    for (size_t i = 0; i < g.size(); ++i) {
      int64_t width = widths[i], block = sizes[i];
      bool is_right = width >= 0 && 0 < block && block <= kMaxBlock;
      buffers->require(is_right, "`blocks` must be from 1 to 256, and `widths` not negative");
      if (!is_right) return;
      int64_t rows = width > 0 ? g[i].size / width : 0;
      buffers->require(rows * width == g[i].size, "`g` must have whole rows");
      int64_t in_row = width / block + (width % block != 0);
      blocks.push_back({width, block, in_row, rows * in_row});
      scales.push_back({nullptr, rows * in_row});
    }
    require_sizes("m", m, g, buffers);
    require_sizes("m_scales", m_scales, scales, buffers);
    require_sizes("v", v, g, buffers);
    require_sizes("v_scales", v_scales, scales, buffers);
    require_sizes("parameters", wide, g, buffers);
    Views<const float> last(g.end() - narrow.from.size(), g.end());
    require_sizes("bfloat16 parameters", narrow, last, buffers);
    buffers->require_sizes("directions", directions, g);
  }

 private:
  template <typename T, typename Sizes>
  static void require_sizes(const char* name, const Changed<T>& both, const Sizes& wanted,
                            Buffers* buffers) {
    buffers->require_sizes(name, both.from, wanted);
    buffers->require_sizes((std::string("new ") + name).c_str(), both.to, wanted);
  }
};

// All but the context that follows.
inline auto adamw8bit_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::BufferR1<ffi::F32>>()   // numbers
      .Arg<ffi::BufferR1<ffi::U32>>()   // seeds
      .Arg<ffi::BufferR0<ffi::PRED>>()  // taken
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("leaves")
      .Attr<bool>("has_parameters")
      .Attr<int64_t>("narrow")
      .Attr<bool>("is_stochastic")
      .Attr<ffi::Span<const int64_t>>("is_decayed")
      .Attr<ffi::Span<const int64_t>>("widths")
      .Attr<ffi::Span<const int64_t>>("blocks");
}

// Checks what it is given, and has `run(executor, Adamw8bit)` do the work.
template <typename Executor, ffi::Error (*run)(Executor, const Adamw8bit&)>
ffi::Error adamw8bit(ffi::BufferR1<ffi::F32> numbers, ffi::BufferR1<ffi::U32> seeds,
                     ffi::BufferR0<ffi::PRED> taken, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, int64_t leaves, bool has_parameters, int64_t narrow,
                     bool is_stochastic, ffi::Span<const int64_t> is_decayed,
                     ffi::Span<const int64_t> widths, ffi::Span<const int64_t> blocks,
                     Executor executor) {
  if (narrow < 0 || narrow > leaves || (!has_parameters && narrow != 0)) {
    return invalid("`narrow` must count leaves with parameters");
  }
  Buffers buffers(args, rets);
  Adamw8bit op = {};
  op.numbers = numbers.typed_data();
  op.seeds = seeds.typed_data();
  op.taken = taken.typed_data();
  op.has_parameters = has_parameters;
  op.is_stochastic = is_stochastic;
  op.first_narrow = leaves - narrow;
  op.is_decayed = is_decayed;
  op.take(&buffers, leaves);
  buffers.require(numbers.element_count() == kAdamwNumbers, "`numbers` must be eight");
  // Halves, since `leaves` may be any number.
  int64_t words = seeds.element_count();
  buffers.require(words % 2 == 0 && words / 2 - 1 == (is_stochastic ? leaves : 0),
                  "`seeds` must be two numbers, and two a leaf for rounding at random");
  buffers.require(static_cast<int64_t>(is_decayed.size()) == leaves,
                  "`is_decayed` must have one of each leaf");
  SFPO_RETURN_IF_ERROR(buffers.error());
  op.check(widths, blocks, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  return run(executor, op);
}

}  // namespace sfpo
