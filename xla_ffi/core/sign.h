// One bit an entry with error feedback (Tang et al. 2021, https://arxiv.org/abs/2102.02888).
//
//     c = m + e                     the momentum and what earlier steps lost of it
//     scale = w * mean |c|          over the live entries of a block
//     q = +-scale, e = c - q        where live, else 0
//
// A sign is bit 31, so -0.0 and a NaN with that bit are negative. A sum over a block is
// sixteen partial ones, entry i in the i mod 16-th, then added in pairs.
#pragma once

#include "core/portable.h"

namespace sfpo {

// What one rank wants to send: (b1 m + g_share g) + e, each operation rounded.
SFPO_INLINE float contribution(float g, float m, float e, float b1, float g_share) {
  return (b1 * m + g_share * g) + e;
}

// `scale`, negative where bit 31 of `bits` is set: what one entry is decoded to.
SFPO_INLINE float signed_scale(float scale, uint32_t bits) {
  return from_bits(to_bits(scale) ^ (bits & kSignBit));
}

SFPO_INLINE float block_scale(float sum_of_magnitudes, int64_t live, float relaxation) {
  return sum_of_magnitudes / static_cast<float>(live > 0 ? live : 1) * relaxation;
}

}  // namespace sfpo
