// AdamW with moments of one byte an entry, scaled block by block; Python's
// `kernels/_quantized.py` has the same code in jnp and says why it is this one.
//
//     signed:    y = sign(x) |x|^(1/2);  scale = max |y| / 127;  code = round(y / scale)
//     unsigned:  y = x^(1/4);            scale = max y / 255;    code = floor(y / scale + r),
//                                                                at least 1 where x > 0
//
// with r a random number in [0, 1). Quotients of a scale are products with its reciprocal.
#pragma once

#include <cmath>

#include "core/portable.h"

namespace sfpo {

// Python's blocks have at most so many entries: what is kept between two passes over one
// fits into a first-level cache, or into the registers of a warp.
inline constexpr int64_t kMaxBlock = 256;

inline constexpr float kSignedUnit = 1.0f / 127;
inline constexpr float kUnsignedUnit = 1.0f / 255;
inline constexpr float kSmallestNormal = 0x1p-126f;

// The numbers of a step, in the order of the operand; shares are 1 - b1 and 1 - b2.
struct AdamwNumbers {
  float b1, m_share, b2, v_share;
  float factor;                       // sqrt(1 - b2^t) / (1 - b1^t)
  float eps;                          // eps sqrt(1 - b2^t)
  float learning_rate, weight_decay;  // of parameters
};

inline constexpr int64_t kAdamwNumbers = 8;

SFPO_INLINE float decode_signed(int32_t code, float scale) {
  float root = static_cast<float>(code) * scale;
  return root * fabsf(root);
}

// What was above 0 stays so, even where the fourth power of a unit underflows.
SFPO_INLINE float decode_unsigned(int32_t code, float scale) {
  float root = static_cast<float>(code) * scale;
  float square = root * root;
  float value = square * square;
  value = value < kSmallestNormal ? kSmallestNormal : value;
  return code > 0 ? value : 0.0f;
}

SFPO_INLINE float next_m(float m, float g, const AdamwNumbers& n) {
  return n.b1 * m + n.m_share * g;
}

SFPO_INLINE float next_v(float v, float g, const AdamwNumbers& n) {
  return n.b2 * v + n.v_share * g * g;
}

SFPO_INLINE float signed_root(float m) {
  return from_bits(to_bits(sqrtf(fabsf(m))) | (to_bits(m) & kSignBit));
}

// The direction, from sqrt(v): where v is 0 no gradient ever was.
SFPO_INLINE float direction(float m, float root_v, const AdamwNumbers& n) {
  float u = m * n.factor / (root_v + n.eps);
  return root_v > 0.0f ? u : 0.0f;
}

// By what roots are multiplied to be codes. Of what is not finite a code is the largest: NaN is
// no integer, and which one a processor makes of it differs.
SFPO_INLINE float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

SFPO_INLINE int32_t encode_signed(float root, float inverse) {
  // Adding 1.5 * 2^23 and taking it away rounds to the nearest integer, halves to even.
  constexpr float kRounder = 0x1.8p23f;
  float code = (root * inverse + kRounder) - kRounder;
  code = code < 127.0f ? code : 127.0f;
  return static_cast<int32_t>(code > -127.0f ? code : -127.0f);
}

SFPO_INLINE int32_t encode_unsigned(float root, float inverse, float random) {
  float units = root * inverse + random;
  int32_t code = static_cast<int32_t>(units < 255.0f ? units : 255.0f);
  int32_t least = root > 0.0f ? 1 : 0;
  return code < least ? least : code;
}

// p - learning_rate * (u + decay * p); without decay what is infinite stays so.
SFPO_INLINE float next_parameter(float p, float u, float decay, float learning_rate) {
  return p - learning_rate * (decay != 0.0f ? u + decay * p : u);
}

}  // namespace sfpo
