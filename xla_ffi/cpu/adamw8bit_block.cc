#include "cpu/adamw8bit_block.h"

#include <cstring>

#include "cpu/simd.h"

// Results may be the operands' buffers, entry by entry: a loop reads an entry before it writes the
// one of the same number. SFPO_SAME_ENTRIES says so, and it is vectorised without a test of that.
#if defined(__clang__)
#define SFPO_SAME_ENTRIES _Pragma("clang loop vectorize(assume_safety)")
#else
#define SFPO_SAME_ENTRIES _Pragma("GCC ivdep")
#endif

namespace sfpo {
namespace {

// The larger of two floats that are not negative, by their bits: these are vectorised.
SFPO_INLINE int32_t larger(int32_t most, float x) {
  int32_t bits = static_cast<int32_t>(to_bits(x) & ~kSignBit);
  return bits > most ? bits : most;
}

SFPO_INLINE float as_float(int32_t bits) { return from_bits(static_cast<uint32_t>(bits)); }

}  // namespace

SFPO_CLONES
void update_block(const float* g, const OldMoments& old, int64_t length,
                  const AdamwNumbers& numbers, uint32_t number, Seed seed, float* directions,
                  const NewMoments& fresh) {
  alignas(64) float m_roots[kMaxBlock], v_roots[kMaxBlock], random[kMaxBlock];
  alignas(64) int32_t m_codes[kMaxBlock], v_codes[kMaxBlock];
  float last_g[kLanes] = {}, last_u[kLanes];
  const AdamwNumbers n = numbers;
  const float old_m_scale = *old.m_scale, old_v_scale = *old.v_scale;
  // Local, since bytes that are written might be any pointer's.
  const int8_t* m_from = old.m;
  const uint8_t* v_from = old.v;
  int8_t* m_to = fresh.m;
  uint8_t* v_to = fresh.v;
  // Whole vectors, and one more that zeros fill up, which change no scale. Counted in 32 bits, as
  // the random numbers are.
  const int32_t count = static_cast<int32_t>(length);
  const int32_t whole = count & static_cast<int32_t>(-kLanes);
  const int32_t end = (count + static_cast<int32_t>(kLanes) - 1) & static_cast<int32_t>(-kLanes);
  for (int32_t i = 0; i < whole; ++i) m_codes[i] = m_from[i];
  for (int32_t i = 0; i < whole; ++i) v_codes[i] = v_from[i];
  for (int32_t i = whole; i < end; ++i) {
    m_codes[i] = i < count ? m_from[i] : 0;
    v_codes[i] = i < count ? v_from[i] : 0;
  }
  std::memcpy(last_g, g + whole, (count - whole) * sizeof(float));

  int32_t m_most = 0, v_most = 0;
  auto step = [&](int32_t first, int32_t last, const float* g, float* u) SFPO_INLINE_BODY {
    SFPO_SAME_ENTRIES
    for (int32_t i = first; i < last; ++i) {
      float m = next_m(decode_signed(m_codes[i], old_m_scale), g[i - first], n);
      float v = next_v(decode_unsigned(v_codes[i], old_v_scale), g[i - first], n);
      float root_v = sqrtf(v);
      u[i - first] = direction(m, root_v, n);
      m_roots[i] = signed_root(m);
      v_roots[i] = sqrtf(root_v);
      m_most = larger(m_most, m_roots[i]);
      v_most = larger(v_most, v_roots[i]);
      // Here, where it costs nothing: the processor is waiting for its divider.
      random[i] = random_unit(random_bits(number + static_cast<uint32_t>(i), seed));
    }
  };
  step(0, whole, g, directions);
  if (whole < end) {
    step(whole, whole + static_cast<int32_t>(kLanes), last_g, last_u);
    std::memcpy(directions + whole, last_u, (count - whole) * sizeof(float));
  }
  float m_scale = as_float(m_most) * kSignedUnit, v_scale = as_float(v_most) * kUnsignedUnit;
  float m_inverse = inverse_of(m_scale), v_inverse = inverse_of(v_scale);
  for (int32_t i = 0; i < end; ++i) {
    m_codes[i] = encode_signed(m_roots[i], m_inverse);
    v_codes[i] = encode_unsigned(v_roots[i], v_inverse, random[i]);
  }
  for (int32_t i = 0; i < count; ++i) m_to[i] = static_cast<int8_t>(m_codes[i]);
  for (int32_t i = 0; i < count; ++i) v_to[i] = static_cast<uint8_t>(v_codes[i]);
  *fresh.m_scale = m_scale;
  *fresh.v_scale = v_scale;
}

SFPO_CLONES
void move_block(const float* parameters, const float* directions, int64_t length, float decay,
                float learning_rate, float* out) {
  SFPO_SAME_ENTRIES
  for (int64_t i = 0; i < length; ++i) {
    out[i] = next_parameter(parameters[i], directions[i], decay, learning_rate);
  }
}

SFPO_CLONES
void move_block(const BFloat16* parameters, const float* directions, int64_t length, float decay,
                float learning_rate, uint32_t number, const Seed* seed, BFloat16* out) {
  alignas(64) float moved[kMaxBlock];
  alignas(64) BFloat16 rounded[kMaxBlock];
  for (int64_t i = 0; i < length; ++i) {
    moved[i] = next_parameter(widen(parameters[i]), directions[i], decay, learning_rate);
  }
  if (seed == nullptr) {
    for (int64_t i = 0; i < length; ++i) rounded[i] = round_to_nearest(moved[i]);
  } else {
    Seed own = *seed;
    for (int64_t i = 0; i < length; ++i) {
      uint32_t random = random_bits(number + static_cast<uint32_t>(i), own);
      rounded[i] = round_at_random(moved[i], random);
    }
  }
  std::memcpy(out, rounded, length * sizeof(BFloat16));
}

}  // namespace sfpo
