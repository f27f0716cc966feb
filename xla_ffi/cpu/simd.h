// Sixteen lanes of float32 or of 32-bit integers, as two halves that fill AVX2's registers.
//
// The halves are the compiler's vector extension, which compiles to the instruction set of the
// clone of the function they are inlined into. They are not one vector of sixteen, for of a
// vector wider than the registers GCC takes every comparison apart lane by lane: with AVX2 that
// made these kernels up to nine times slower.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/portable.h"

// One version of a function for each instruction set, chosen when the library is loaded.
#if defined(SFPO_HAS_TARGET_CLONES)
#define SFPO_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define SFPO_CLONES
#endif

// Of a lambda, which would otherwise be compiled for no instruction set but the default one.
#define SFPO_INLINE_BODY __attribute__((always_inline))

namespace sfpo {

inline constexpr int64_t kLanes = 16;

// Lanes of T, the first half of them in `low`.
template <typename T>
struct Lanes {
  typedef T Half __attribute__((vector_size(32)));
  // In memory, where it lies anywhere. A copy of 32 bytes by memcpy would go through the stack.
  typedef T Stored __attribute__((vector_size(32), aligned(4), may_alias));
  Half low, high;
};

// The lanes of a half by their numbers; GCC knows Clang's name for it from version 12 on.
#if defined(__clang__)
#define SFPO_SHUFFLE(half, ...) __builtin_shufflevector(half, half, __VA_ARGS__)
#else
#define SFPO_SHUFFLE(half, ...) __builtin_shuffle(half, Lanes<int32_t>::Half{__VA_ARGS__})
#endif

using F16 = Lanes<float>;
using U16 = Lanes<uint32_t>;
using I16 = Lanes<int32_t>;

#define SFPO_BINARY(op)                                                 \
  template <typename T>                                                 \
  SFPO_INLINE Lanes<T> operator op(Lanes<T> a, Lanes<T> b) {            \
    return {a.low op b.low, a.high op b.high};                          \
  }                                                                     \
  template <typename T>                                                 \
  SFPO_INLINE Lanes<T>& operator op##=(Lanes<T>& a, Lanes<T> b) {       \
    return a = a op b;                                                  \
  }

SFPO_BINARY(+)
SFPO_BINARY(-)
SFPO_BINARY(*)
SFPO_BINARY(&)
SFPO_BINARY(^)
#undef SFPO_BINARY

template <typename T>
SFPO_INLINE Lanes<T> operator~(Lanes<T> x) {
  return {~x.low, ~x.high};
}

// -1 in the lanes where it holds, 0 in the others.
#define SFPO_COMPARISON(op)                                             \
  template <typename T>                                                 \
  SFPO_INLINE I16 operator op(Lanes<T> a, Lanes<T> b) {                 \
    return {a.low op b.low, a.high op b.high};                          \
  }

SFPO_COMPARISON(==)
SFPO_COMPARISON(<)
SFPO_COMPARISON(>)
#undef SFPO_COMPARISON

template <typename T>
SFPO_INLINE Lanes<T> splat(T x) {
  typename Lanes<T>::Half first = {x};
  auto all = SFPO_SHUFFLE(first, 0, 0, 0, 0, 0, 0, 0, 0);
  return {all, all};
}

// The same bits as lanes of another kind.
template <typename To, typename T>
SFPO_INLINE Lanes<To> as(Lanes<T> x) {
  using Half = typename Lanes<To>::Half;
  return {reinterpret_cast<Half>(x.low), reinterpret_cast<Half>(x.high)};
}

SFPO_INLINE U16 as_bits(F16 x) { return as<uint32_t>(x); }

// a in the lanes that are set, b in the others.
template <typename T>
SFPO_INLINE Lanes<T> choose(I16 where, Lanes<T> a, Lanes<T> b) {
  return {where.low ? a.low : b.low, where.high ? a.high : b.high};
}

template <typename T>
SFPO_INLINE Lanes<T> load(const T* from) {
  auto halves = reinterpret_cast<const typename Lanes<T>::Stored*>(from);
  return {halves[0], halves[1]};
}

template <typename T>
SFPO_INLINE void store(T* to, Lanes<T> x) {
  auto halves = reinterpret_cast<typename Lanes<T>::Stored*>(to);
  halves[0] = x.low;
  halves[1] = x.high;
}

// The first `count` of 16 floats, zeros after them.
SFPO_INLINE F16 load(const float* from, int64_t count) {
  if (count == kLanes) return load(from);
  float some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(float));
  return load(some);
}

SFPO_INLINE void store(float* to, F16 x, int64_t count) {
  if (count == kLanes) return store(to, x);
  float some[kLanes];
  store(some, x);
  std::memcpy(to, some, count * sizeof(float));
}

// body(i, count) for each vector of `length` entries, then of the padding up to `end`: a loop of
// full vectors, in which the compiler knows the count, and what is left.
template <typename Body>
SFPO_INLINE void each_vector(int64_t length, int64_t end, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) body(i, kLanes);
  for (; i < end; i += kLanes) body(i, std::clamp<int64_t>(length - i, 0, kLanes));
}

inline constexpr uint32_t kLaneBits[kLanes] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,
                                               1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                               1u << 8,  1u << 9,  1u << 10, 1u << 11,
                                               1u << 12, 1u << 13, 1u << 14, 1u << 15};

// Lane j is 1 << j.
SFPO_INLINE U16 lane_bits() { return load(kLaneBits); }

// All bits of a lane set where its bit in `word` is.
SFPO_INLINE U16 spread(uint32_t word) {
  U16 bits = lane_bits();
  return as<uint32_t>((bits & splat(word)) == bits);
}

// Bit j set where any bit of lane j is; the reverse of `spread`.
template <typename T>
SFPO_INLINE uint32_t gather(Lanes<T> lanes) {
  U16 bits = lane_bits() & as<uint32_t>(lanes);
  auto half = bits.low | bits.high;
  half |= SFPO_SHUFFLE(half, 4, 5, 6, 7, 0, 1, 2, 3);
  half |= SFPO_SHUFFLE(half, 2, 3, 0, 1, 6, 7, 4, 5);
  half |= SFPO_SHUFFLE(half, 1, 0, 3, 2, 5, 4, 7, 6);
  return half[0];
}

// The sign bits, bit j of lane j.
SFPO_INLINE uint32_t sign_word(F16 x) { return gather(as<int32_t>(x) < splat(0)); }

SFPO_INLINE F16 select(U16 mask, F16 x) { return as<float>(mask & as_bits(x)); }

SFPO_INLINE F16 magnitude(F16 x) { return as<float>(as_bits(x) & splat(~kSignBit)); }

// `scale` with the signs of x.
SFPO_INLINE F16 with_signs(float scale, U16 bits) {
  return as<float>(splat(to_bits(scale)) ^ (bits & splat(kSignBit)));
}

// The sum of the lanes, pairs eight, four, two and one apart.
SFPO_INLINE float total(F16 x) {
  float lane[kLanes];
  store(lane, x);
  for (int64_t apart = kLanes / 2; apart > 0; apart /= 2) {
    for (int64_t i = 0; i < apart; ++i) lane[i] += lane[i + apart];
  }
  return lane[0];
}

SFPO_INLINE int64_t sum_of(I16 x) {
  int32_t lane[kLanes];
  store(lane, x);
  int64_t sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += lane[i];
  return sum;
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
