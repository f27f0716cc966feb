// The arithmetic of signs, a row at a time. A row's entries stay in the first-level cache
// between the pass that makes its scale and the pass that makes its error.
#pragma once

#include <cstdint>

namespace sfpo {

// What one row is encoded from; null pointers stand for what is not there.
struct RowSource {
  const float* x;                   // gradients, or what is to be sent
  const float* momentum = nullptr;  // b1 * momentum + g_share * x is sent
  const float* error = nullptr;     // added to it
  const float* variance = nullptr;  // entries are live where it is positive; null: all
};

struct Factors {
  float b1;
  float g_share;     // 1 - b1
  float relaxation;  // of the scale
};

// Encodes `length` entries as a row of `width`, a multiple of 8, the rest being padding.
// `error` may be the source's.
void encode_row(const RowSource& from, int64_t length, int64_t width, Factors factors,
                uint8_t* signs, uint8_t* live, float* scale, float* error);

// Encodes the mean of what `ranks` rows, `stride` rows apart, stand for, plus `error`. Live
// entries are those of `live`; `new_error` may be `error`.
void serve_row(const uint8_t* signs, const float* scales, int64_t ranks, int64_t stride,
               const uint8_t* live, const float* error, int64_t width, float relaxation,
               uint8_t* new_signs, float* new_scale, float* new_error);

// The +-scale that a row stands for, zero where the variance is given and not positive.
void decode_row(const uint8_t* signs, float scale, const float* variance, int64_t length,
                int64_t width, float* values);

}  // namespace sfpo
