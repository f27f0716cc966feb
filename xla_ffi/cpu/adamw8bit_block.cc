#include "cpu/adamw8bit_block.h"

#include <cstring>

#include "cpu/simd.h"

// Each loop reads what it is given and writes arrays of its own, which can overlap with
// nothing: results may be the operands' buffers, and still the loops are vectorised.

namespace sfpo {
namespace {

// The larger of two floats that are not negative, by their bits: these are vectorised.
SFPO_INLINE int32_t larger(int32_t most, float x) {
  int32_t bits = static_cast<int32_t>(to_bits(x) & ~kSignBit);
  return bits > most ? bits : most;
}

SFPO_INLINE float as_float(int32_t bits) { return from_bits(static_cast<uint32_t>(bits)); }

// `length` entries and zeros up to `end`, in `to`.
template <typename T>
SFPO_INLINE const T* pad(const T* from, int64_t length, int64_t end, T* to) {
  std::memcpy(to, from, length * sizeof(T));
  std::memset(to + length, 0, (end - length) * sizeof(T));
  return to;
}

}  // namespace

SFPO_CLONES
void update_block(const float* g, const OldMoments& old, int64_t length,
                  const AdamwNumbers& numbers, uint32_t number, Seed seed, float* directions,
                  const NewMoments& fresh) {
  alignas(64) float u[kMaxBlock], m_roots[kMaxBlock], v_roots[kMaxBlock], random[kMaxBlock];
  alignas(64) int32_t m_codes[kMaxBlock], v_codes[kMaxBlock];
  alignas(64) float padded_g[kMaxBlock];
  alignas(64) int8_t m_bytes[kMaxBlock];
  alignas(64) uint8_t v_bytes[kMaxBlock];
  const AdamwNumbers n = numbers;
  const float old_m_scale = *old.m_scale, old_v_scale = *old.v_scale;
  const int8_t* m_from = old.m;
  const uint8_t* v_from = old.v;
  // Zeros after the end change no scale, and leave no rest that is not a vector.
  const int64_t end = (length + kLanes - 1) & -kLanes;
  if (end != length) {
    g = pad(g, length, end, padded_g);
    m_from = pad(m_from, length, end, m_bytes);
    v_from = pad(v_from, length, end, v_bytes);
  }
  for (int64_t i = 0; i < end; ++i) m_codes[i] = m_from[i];
  for (int64_t i = 0; i < end; ++i) v_codes[i] = v_from[i];
  int32_t m_most = 0, v_most = 0;
  for (int64_t i = 0; i < end; ++i) {
    float m = next_m(decode_signed(m_codes[i], old_m_scale), g[i], n);
    float v = next_v(decode_unsigned(v_codes[i], old_v_scale), g[i], n);
    float root_v = sqrtf(v);
    u[i] = direction(m, root_v, n);
    m_roots[i] = signed_root(m);
    v_roots[i] = sqrtf(root_v);
    m_most = larger(m_most, m_roots[i]);
    v_most = larger(v_most, v_roots[i]);
    // Here, where it costs nothing: the processor is waiting for its divider.
    random[i] = random_unit(random_bits(number + static_cast<uint32_t>(i), seed));
  }
  float m_scale = as_float(m_most) * kSignedUnit, v_scale = as_float(v_most) * kUnsignedUnit;
  float m_inverse = inverse_of(m_scale), v_inverse = inverse_of(v_scale);
  for (int64_t i = 0; i < end; ++i) {
    m_codes[i] = encode_signed(m_roots[i], m_inverse);
    v_codes[i] = encode_unsigned(v_roots[i], v_inverse, random[i]);
  }
  for (int64_t i = 0; i < end; ++i) m_bytes[i] = static_cast<int8_t>(m_codes[i]);
  for (int64_t i = 0; i < end; ++i) v_bytes[i] = static_cast<uint8_t>(v_codes[i]);
  std::memcpy(directions, u, length * sizeof(float));
  std::memcpy(fresh.m, m_bytes, length);
  std::memcpy(fresh.v, v_bytes, length);
  *fresh.m_scale = m_scale;
  *fresh.v_scale = v_scale;
}

SFPO_CLONES
void move_block(const float* parameters, const float* directions, int64_t length, float decay,
                float learning_rate, float* out) {
  alignas(64) float moved[kMaxBlock];
  for (int64_t i = 0; i < length; ++i) {
    moved[i] = next_parameter(parameters[i], directions[i], decay, learning_rate);
  }
  std::memcpy(out, moved, length * sizeof(float));
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
