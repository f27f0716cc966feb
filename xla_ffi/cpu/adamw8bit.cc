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
#include <cstring>

#include "cpu/adamw8bit_block.h"
#include "cpu/parallel.h"
#include "ffi_helpers.h"

namespace sfpo {

template <>
inline constexpr ffi::DataType kDataType<BFloat16> = ffi::BF16;

namespace {

// How many blocks a thread claims at once, as entries.
constexpr int64_t kChunkEntries = 1 << 16;

template <typename T>
struct Changed {
  Views<const T> from;
  Views<T> to;

  // Leaves everything as it was.
  void copy() const {
    for (size_t i = 0; i < to.size(); ++i) {
      if (to[i].data != from[i].data && to[i].size > 0) {
        std::memcpy(to[i].data, from[i].data, to[i].size * sizeof(T));
      }
    }
  }
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

struct Chunk {
  int64_t leaf;
  int64_t first;
  int64_t end;
};

class Update {
 public:
  Update(Buffers* buffers, int64_t leaves, bool has_parameters, int64_t narrow)
      : first_narrow_(leaves - narrow), has_parameters_(has_parameters) {
    int64_t wide = has_parameters ? leaves - narrow : 0;
    g_ = buffers->operands<float>("g", leaves);
    m_.from = buffers->operands<int8_t>("m", leaves);
    m_scales_.from = buffers->operands<float>("m_scales", leaves);
    v_.from = buffers->operands<uint8_t>("v", leaves);
    v_scales_.from = buffers->operands<float>("v_scales", leaves);
    wide_.from = buffers->operands<float>("parameters", wide);
    narrow_.from = buffers->operands<BFloat16>("bfloat16 parameters", narrow);
    m_.to = buffers->results<int8_t>("m", leaves);
    m_scales_.to = buffers->results<float>("m_scales", leaves);
    v_.to = buffers->results<uint8_t>("v", leaves);
    v_scales_.to = buffers->results<float>("v_scales", leaves);
    wide_.to = buffers->results<float>("parameters", wide);
    narrow_.to = buffers->results<BFloat16>("bfloat16 parameters", narrow);
    directions_ = buffers->results<float>("directions", has_parameters ? 0 : leaves);
  }

  // Whether everything has the size that the first of its leaf has.
  void check(ffi::Span<const int64_t> widths, ffi::Span<const int64_t> blocks, Buffers* buffers) {
    buffers->require(widths.size() == g_.size() && blocks.size() == g_.size(),
                     "`widths` and `blocks` must have one of each leaf");
    if (widths.size() != g_.size() || blocks.size() != g_.size()) return;
    std::vector<View<float>> scales;
    for (size_t i = 0; i < g_.size(); ++i) {
      int64_t width = widths[i], block = blocks[i];
      bool is_right = width >= 0 && 0 < block && block <= kMaxBlock;
      buffers->require(is_right, "`blocks` must be from 1 to 256, and `widths` not negative");
      if (!is_right) return;
      int64_t rows = width > 0 ? g_[i].size / width : 0;
      buffers->require(rows * width == g_[i].size, "`g` must have whole rows");
      int64_t in_row = width / block + (width % block != 0);
      blocks_.push_back({width, block, in_row, rows * in_row});
      scales.push_back({nullptr, rows * in_row});
    }
    buffers->require_sizes("m", m_.from, g_);
    buffers->require_sizes("new m", m_.to, g_);
    buffers->require_sizes("v", v_.from, g_);
    buffers->require_sizes("new v", v_.to, g_);
    buffers->require_sizes("m_scales", m_scales_.from, scales);
    buffers->require_sizes("new m_scales", m_scales_.to, scales);
    buffers->require_sizes("v_scales", v_scales_.from, scales);
    buffers->require_sizes("new v_scales", v_scales_.to, scales);
    buffers->require_sizes("directions", directions_, g_);
    buffers->require_sizes("parameters", wide_.from, g_);
    buffers->require_sizes("new parameters", wide_.to, g_);
    Views<const float> last(g_.end() - narrow_.from.size(), g_.end());
    buffers->require_sizes("bfloat16 parameters", narrow_.from, last);
    buffers->require_sizes("new bfloat16 parameters", narrow_.to, last);
  }

  // A step that is not taken.
  void skip() const {
    m_.copy();
    m_scales_.copy();
    v_.copy();
    v_scales_.copy();
    wide_.copy();
    narrow_.copy();
    for (const View<float>& u : directions_) std::fill_n(u.data, u.size, 0.0f);
  }

  std::vector<Chunk> chunks() const {
    std::vector<Chunk> chunks;
    for (size_t leaf = 0; leaf < blocks_.size(); ++leaf) {
      int64_t step = kChunkEntries / blocks_[leaf].block, count = blocks_[leaf].count;
      for (int64_t first = 0; first < count; first += step) {
        chunks.push_back({static_cast<int64_t>(leaf), first, std::min(first + step, count)});
      }
    }
    return chunks;
  }

  // `rounding` has one of each leaf, or is null.
  void run(const Chunk& chunk, const AdamwNumbers& numbers, Seed seed, bool is_decayed,
           const Seed* rounding) const {
    const Blocks& blocks = blocks_[chunk.leaf];
    float decay = is_decayed ? numbers.weight_decay : 0.0f;
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      int64_t start = blocks.start(i), length = blocks.length(i), leaf = chunk.leaf;
      uint32_t number = static_cast<uint32_t>(start);
      float within[kMaxBlock];
      float* u = has_parameters_ ? within : directions_[leaf].data + start;
      update_block(g_[leaf].data + start,
                   {m_.from[leaf].data + start, m_scales_.from[leaf].data + i,
                    v_.from[leaf].data + start, v_scales_.from[leaf].data + i},
                   length, numbers, number, seed, u,
                   {m_.to[leaf].data + start, m_scales_.to[leaf].data + i,
                    v_.to[leaf].data + start, v_scales_.to[leaf].data + i});
      if (!has_parameters_) continue;
      if (leaf < first_narrow_) {
        move_block(wide_.from[leaf].data + start, u, length, decay, numbers.learning_rate,
                   wide_.to[leaf].data + start);
      } else {
        int64_t place = leaf - first_narrow_;
        move_block(narrow_.from[place].data + start, u, length, decay, numbers.learning_rate,
                   number, rounding, narrow_.to[place].data + start);
      }
    }
  }

 private:
  int64_t first_narrow_;
  bool has_parameters_;
  Views<const float> g_;
  Changed<int8_t> m_;
  Changed<float> m_scales_;
  Changed<uint8_t> v_;
  Changed<float> v_scales_;
  Changed<float> wide_;
  Changed<BFloat16> narrow_;
  Views<float> directions_;
  std::vector<Blocks> blocks_;
};

ffi::Error adamw8bit(ffi::ThreadPool pool, ffi::BufferR1<ffi::F32> numbers,
                     ffi::BufferR1<ffi::U32> seeds, ffi::BufferR0<ffi::PRED> taken,
                     ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t leaves,
                     bool has_parameters, int64_t narrow, bool is_stochastic,
                     ffi::Span<const int64_t> is_decayed, ffi::Span<const int64_t> widths,
                     ffi::Span<const int64_t> blocks) {
  if (narrow < 0 || narrow > leaves || (!has_parameters && narrow != 0)) {
    return invalid("`narrow` must count leaves with parameters");
  }
  Buffers buffers(args, rets);
  Update update(&buffers, leaves, has_parameters, narrow);
  buffers.require(numbers.element_count() == kAdamwNumbers, "`numbers` must be eight");
  // Halves, since `leaves` may be any number.
  int64_t words = seeds.element_count();
  buffers.require(words % 2 == 0 && words / 2 - 1 == (is_stochastic ? leaves : 0),
                  "`seeds` must be two numbers, and two a leaf for rounding at random");
  buffers.require(static_cast<int64_t>(is_decayed.size()) == leaves,
                  "`is_decayed` must have one of each leaf");
  SFPO_RETURN_IF_ERROR(buffers.error());
  update.check(widths, blocks, &buffers);
  SFPO_RETURN_IF_ERROR(buffers.error());
  if (!*taken.typed_data()) {
    update.skip();
    return ffi::Error::Success();
  }

  const float* x = numbers.typed_data();
  AdamwNumbers all{x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
  const uint32_t* seed = seeds.typed_data();
  std::vector<Chunk> chunks = update.chunks();
  parallel_for(pool, chunks.size(), [&](int64_t i) {
    int64_t leaf = chunks[i].leaf;
    Seed rounding{};
    if (is_stochastic) rounding = {seed[2 + 2 * leaf], seed[3 + 2 * leaf]};
    update.run(chunks[i], all, {seed[0], seed[1]}, is_decayed[leaf] != 0,
               is_stochastic ? &rounding : nullptr);
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_adamw8bit, adamw8bit,
                    ffi::Ffi::Bind()
                        .Ctx<ffi::ThreadPool>()
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
                        .Attr<ffi::Span<const int64_t>>("blocks"));

}  // namespace sfpo
