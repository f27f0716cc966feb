#include "cpu/sign_rows.h"

#include "core/sign.h"
#include "cpu/simd.h"

namespace sfpo {
namespace {

// The second pass: what the signs and the scale lose of `error`, in place.
SFPO_INLINE void subtract_decoded(float* error, const uint8_t* live, float scale, int64_t length,
                                  int64_t width) {
  each_vector(length, length, [=](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 c = load(error + i, count);
    F16 lost = c - with_signs(scale, as_bits(c));
    store(error + i, select(spread(load_word(live, i, width)), lost), count);
  });
}

}  // namespace

SFPO_CLONES
void encode_row(const RowSource& from, int64_t length, int64_t width, Factors factors,
                uint8_t* signs, uint8_t* live, float* scale, float* error) {
  // Copied, since bytes that are written might be any pointer's.
  const RowSource row = from;
  F16 sum = {};
  int64_t alive = 0;
  each_vector(length, width, [&](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 c = load(row.x + i, count);
    if (row.momentum != nullptr) {
      c = splat(factors.b1) * load(row.momentum + i, count) + splat(factors.g_share) * c;
    }
    if (row.error != nullptr) c += load(row.error + i, count);
    uint32_t alive_here = (1u << count) - 1;
    if (row.variance != nullptr) {
      alive_here = gather(load(row.variance + i, count) > splat(0.0f));
    }
    sum += select(spread(alive_here), magnitude(c));
    alive += __builtin_popcount(alive_here);
    store_word(signs, i, width, sign_word(c));
    store_word(live, i, width, alive_here);
    if (error != nullptr) store(error + i, c, count);
  });
  *scale = block_scale(total(sum), alive, factors.relaxation);
  if (error != nullptr) subtract_decoded(error, live, *scale, length, width);
}

SFPO_CLONES
void serve_row(const uint8_t* signs, const float* scales, int64_t ranks, int64_t stride,
               const uint8_t* live, const float* error, int64_t width, float relaxation,
               uint8_t* new_signs, float* new_scale, float* new_error) {
  F16 sum = {};
  int64_t alive = 0;
  float share = 1.0f / static_cast<float>(ranks);
  each_vector(width, width, [&](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 c = {};
    for (int64_t rank = 0; rank < ranks; ++rank) {
      int64_t row = rank * stride;
      c += with_signs(scales[row], spread(load_word(signs + row * (width / 8), i, width)));
    }
    c *= splat(share);
    uint32_t alive_here = load_word(live, i, width);
    c = select(spread(alive_here), c);
    if (error != nullptr) c += load(error + i, count);
    sum += select(spread(alive_here), magnitude(c));
    alive += __builtin_popcount(alive_here);
    store_word(new_signs, i, width, sign_word(c));
    if (new_error != nullptr) store(new_error + i, c, count);
  });
  *new_scale = block_scale(total(sum), alive, relaxation);
  if (new_error != nullptr) subtract_decoded(new_error, live, *new_scale, width, width);
}

SFPO_CLONES
void decode_row(const uint8_t* signs, float scale, const float* variance, int64_t length,
                int64_t width, float* values) {
  each_vector(length, length, [=](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 value = with_signs(scale, spread(load_word(signs, i, width)));
    if (variance != nullptr) {
      value = select(as<uint32_t>(load(variance + i, count) > splat(0.0f)), value);
    }
    store(values + i, value, count);
  });
}

}  // namespace sfpo
