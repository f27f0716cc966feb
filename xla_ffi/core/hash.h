// Random bits from the number of an entry and a seed: the finaliser of MurmurHash3 (Austin
// Appleby, public domain), twice. Python makes the seed and has the same function in jnp.
#pragma once

#include "core/portable.h"

namespace sfpo {

struct Seed {
  uint32_t before;
  uint32_t between;
};

SFPO_INLINE uint32_t finalise(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// `number` is the entry's place in its leaf, row by row, modulo 2^32.
SFPO_INLINE uint32_t random_bits(uint32_t number, Seed seed) {
  return finalise(finalise(number ^ seed.before) ^ seed.between);
}

// A multiple of 2^-24 in [0, 1). By way of int32_t, for which there is an instruction.
SFPO_INLINE float random_unit(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;
}

}  // namespace sfpo
