// sfpo_adamw8bit on XLA's threads.
#include "operands/adamw8bit.h"

#include <cstring>

#include "cpu/adamw8bit_block.h"
#include "cpu/parallel.h"

namespace sfpo {
namespace {

// How many blocks a thread claims at once, as entries.
constexpr int64_t kChunkEntries = 1 << 16;

struct Chunk {
  int64_t leaf;
  int64_t first;
  int64_t end;
};

std::vector<Chunk> cut(const std::vector<Blocks>& blocks) {
  std::vector<Chunk> chunks;
  for (size_t leaf = 0; leaf < blocks.size(); ++leaf) {
    int64_t step = kChunkEntries / blocks[leaf].block, count = blocks[leaf].count;
    for (int64_t first = 0; first < count; first += step) {
      chunks.push_back({static_cast<int64_t>(leaf), first, std::min(first + step, count)});
    }
  }
  return chunks;
}

// Leaves everything as it was.
template <typename T>
void copy(const Changed<T>& both) {
  for (size_t i = 0; i < both.to.size(); ++i) {
    const View<T>& to = both.to[i];
    const T* from = both.from[i].data;
    if (to.data != from && to.size > 0) std::memcpy(to.data, from, to.size * sizeof(T));
  }
}

// A step that is not taken.
void skip(const Adamw8bit& op) {
  copy(op.m);
  copy(op.m_scales);
  copy(op.v);
  copy(op.v_scales);
  copy(op.wide);
  copy(op.narrow);
  for (const View<float>& u : op.directions) std::fill_n(u.data, u.size, 0.0f);
}

// Asks for what the block after the one at hand reads: the processor's own guess ends with each
// page, after four blocks, and while a block is worked on it loads nothing.
template <typename T>
void fetch_ahead(const T* from, int64_t entries) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < entries; i += kLine) __builtin_prefetch(from + i);
}

// `seed` is of v's rounding, `rounding` of the parameters', or null.
void update(const Adamw8bit& op, const Chunk& chunk, const AdamwNumbers& numbers, Seed seed,
            const Seed* rounding) {
  int64_t leaf = chunk.leaf;
  const Blocks& blocks = op.blocks[leaf];
  float decay = op.is_decayed[leaf] != 0 ? numbers.weight_decay : 0.0f;
  for (int64_t i = chunk.first; i < chunk.end; ++i) {
    int64_t start = blocks.start(i), length = blocks.length(i);
    uint32_t number = static_cast<uint32_t>(start);
    if (i + 1 < chunk.end) {
      int64_t next = blocks.start(i + 1), count = blocks.length(i + 1);
      fetch_ahead(op.g[leaf].data + next, count);
      if (op.has_parameters && leaf < op.first_narrow) {
        fetch_ahead(op.wide.from[leaf].data + next, count);
      }
    }
    float within[kMaxBlock];
    float* u = op.has_parameters ? within : op.directions[leaf].data + start;
    update_block(op.g[leaf].data + start,
                 {op.m.from[leaf].data + start, op.m_scales.from[leaf].data + i,
                  op.v.from[leaf].data + start, op.v_scales.from[leaf].data + i},
                 length, numbers, number, seed, u,
                 {op.m.to[leaf].data + start, op.m_scales.to[leaf].data + i,
                  op.v.to[leaf].data + start, op.v_scales.to[leaf].data + i});
    if (!op.has_parameters) continue;
    if (leaf < op.first_narrow) {
      move_block(op.wide.from[leaf].data + start, u, length, decay, numbers.learning_rate,
                 op.wide.to[leaf].data + start);
    } else {
      int64_t place = leaf - op.first_narrow;
      move_block(op.narrow.from[place].data + start, u, length, decay, numbers.learning_rate,
                 number, rounding, op.narrow.to[place].data + start);
    }
  }
}

ffi::Error run(ffi::ThreadPool pool, const Adamw8bit& op) {
  if (!*op.taken) {
    skip(op);
    return ffi::Error::Success();
  }
  const float* x = op.numbers;
  AdamwNumbers numbers{x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
  Seed seed{op.seeds[0], op.seeds[1]};
  std::vector<Chunk> chunks = cut(op.blocks);
  parallel_for(pool, chunks.size(), chunks.size() * kChunkEntries, [&](int64_t i) {
    const uint32_t* words = op.rounding(chunks[i].leaf);
    Seed rounding{};
    if (words != nullptr) rounding = {words[0], words[1]};
    update(op, chunks[i], numbers, seed, words != nullptr ? &rounding : nullptr);
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_adamw8bit, (adamw8bit<ffi::ThreadPool, run>),
                    adamw8bit_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
