// Sixteen lanes of float32 by the compiler's vector extension: two AVX2 registers, one of
// AVX-512, four of SSE2, by the clone of the function they are inlined into.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/portable.h"

// One version of a function for each instruction set, chosen when the library is loaded.
#if defined(SFPO_HAS_TARGET_CLONES)
#define SFPO_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define SFPO_CLONES
#endif

namespace sfpo {

inline constexpr int64_t kLanes = 16;

typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));

inline constexpr U16 kLaneBits = {1u << 0,  1u << 1,  1u << 2,  1u << 3, 1u << 4,  1u << 5,
                                  1u << 6,  1u << 7,  1u << 8,  1u << 9, 1u << 10, 1u << 11,
                                  1u << 12, 1u << 13, 1u << 14, 1u << 15};

SFPO_INLINE F16 splat(float x) { return F16{} + x; }

SFPO_INLINE U16 as_bits(F16 x) { return reinterpret_cast<U16>(x); }

SFPO_INLINE F16 as_floats(U16 x) { return reinterpret_cast<F16>(x); }

// The first `count` of 16 floats, zeros after them.
SFPO_INLINE F16 load(const float* from, int64_t count) {
  F16 x = {};
  if (count == kLanes) {
    std::memcpy(&x, from, sizeof x);
  } else {
    std::memcpy(&x, from, count * sizeof(float));
  }
  return x;
}

SFPO_INLINE void store(float* to, F16 x, int64_t count) {
  if (count == kLanes) {
    std::memcpy(to, &x, sizeof x);
  } else {
    std::memcpy(to, &x, count * sizeof(float));
  }
}

// All bits of a lane set where its bit in `word` is.
SFPO_INLINE U16 spread(uint32_t word) {
  return reinterpret_cast<U16>((kLaneBits & (U16{} + word)) != 0u);
}

// Bit j set where any bit of lane j is; the reverse of `spread`.
SFPO_INLINE uint32_t gather(U16 lanes) {
  U16 bits = kLaneBits & lanes;
  uint32_t words[kLanes];
  std::memcpy(words, &bits, sizeof bits);
  typedef uint32_t U8 __attribute__((vector_size(32)));
  typedef uint32_t U4 __attribute__((vector_size(16)));
  U8 low8, high8;
  std::memcpy(&low8, words, sizeof low8);
  std::memcpy(&high8, words + 8, sizeof high8);
  low8 |= high8;
  U4 low4, high4;
  std::memcpy(&low4, &low8, sizeof low4);
  std::memcpy(&high4, reinterpret_cast<const char*>(&low8) + sizeof low4, sizeof high4);
  low4 |= high4;
  return (low4[0] | low4[1]) | (low4[2] | low4[3]);
}

// The sign bits, bit j of lane j.
SFPO_INLINE uint32_t sign_word(F16 x) {
  return gather(reinterpret_cast<U16>(reinterpret_cast<I16>(x) < 0));
}

SFPO_INLINE F16 select(U16 mask, F16 x) { return as_floats(mask & as_bits(x)); }

SFPO_INLINE F16 magnitude(F16 x) { return as_floats(as_bits(x) & ~(U16{} + kSignBit)); }

// `scale` with the signs of x.
SFPO_INLINE F16 with_signs(float scale, U16 bits) {
  return as_floats((U16{} + to_bits(scale)) ^ (bits & (U16{} + kSignBit)));
}

// The sum of the lanes, pairs eight, four, two and one apart.
SFPO_INLINE float total(F16 x) {
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof lane);
  for (int64_t apart = kLanes / 2; apart > 0; apart /= 2) {
    for (int64_t i = 0; i < apart; ++i) lane[i] += lane[i + apart];
  }
  return lane[0];
}

// 8 or 16 bits at an entry whose number is a multiple of 16.
SFPO_INLINE uint32_t load_word(const uint8_t* bytes, int64_t entry, int64_t width) {
  uint32_t word = bytes[entry / 8];
  if (entry + 8 < width) word |= uint32_t{bytes[entry / 8 + 1]} << 8;
  return word;
}

SFPO_INLINE void store_word(uint8_t* bytes, int64_t entry, int64_t width, uint32_t word) {
  bytes[entry / 8] = static_cast<uint8_t>(word);
  if (entry + 8 < width) bytes[entry / 8 + 1] = static_cast<uint8_t>(word >> 8);
}

}  // namespace sfpo
