// The update of AdamW with moments of one byte, a block of one scale at a time.
#pragma once

#include <cstdint>

#include "core/adamw8bit.h"
#include "core/bfloat16.h"
#include "core/hash.h"

namespace sfpo {

// The codes and scales of one block of both moments.
template <typename M, typename V, typename S>
struct BlockMoments {
  M* m;
  S* m_scale;
  V* v;
  S* v_scale;
};

using OldMoments = BlockMoments<const int8_t, const uint8_t, const float>;
using NewMoments = BlockMoments<int8_t, uint8_t, float>;

// Writes the directions of `length` entries and their new moments; all may be the operands'
// buffers. `number` is that of the first entry in its leaf.
void update_block(const float* g, const OldMoments& old, int64_t length,
                  const AdamwNumbers& numbers, uint32_t number, Seed seed, float* directions,
                  const NewMoments& fresh);

// New parameters from directions; `out` may be `parameters`.
void move_block(const float* parameters, const float* directions, int64_t length, float decay,
                float learning_rate, float* out);

// Likewise, rounded to nearest, or at random where there is a seed.
void move_block(const BFloat16* parameters, const float* directions, int64_t length, float decay,
                float learning_rate, uint32_t number, const Seed* seed, BFloat16* out);

}  // namespace sfpo
