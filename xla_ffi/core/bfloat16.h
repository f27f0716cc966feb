// bfloat16 as the upper half of a float32, and two ways to round to it.
#pragma once

#include "core/portable.h"

namespace sfpo {

struct BFloat16 {
  uint16_t bits;
};

inline constexpr uint32_t kExponentBits = 0x7F800000u;

SFPO_INLINE float widen(BFloat16 x) { return from_bits(uint32_t{x.bits} << 16); }

// To the nearest, of two as near to the even one; a NaN stays one.
SFPO_INLINE BFloat16 round_to_nearest(float x) {
  uint32_t bits = to_bits(x);
  uint32_t moved = bits + 0x7FFFu + ((bits >> 16) & 1u);
  uint32_t nan = bits | 0x400000u;
  bool is_nan = (bits & ~kSignBit) > kExponentBits;
  return {static_cast<uint16_t>((is_nan ? nan : moved) >> 16)};
}

// Up with the probability of the remainder: random bits are added below the last bit that
// stays. What is not finite is rounded to nearest, as they would make a NaN of an infinity.
SFPO_INLINE BFloat16 round_at_random(float x, uint32_t random) {
  uint32_t bits = to_bits(x);
  uint32_t moved = bits + (random & 0xFFFFu);
  bool is_finite = (bits & kExponentBits) != kExponentBits;
  return {is_finite ? static_cast<uint16_t>(moved >> 16) : round_to_nearest(x).bits};
}

}  // namespace sfpo
