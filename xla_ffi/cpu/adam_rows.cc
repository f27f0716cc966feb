#include "cpu/adam_rows.h"

#include "core/adam.h"
#include "cpu/simd.h"

namespace sfpo {

SFPO_CLONES
void onebit_row(const uint8_t* signs, float scale, const float* variance, const float* parameters,
                bool has_decay, int64_t length, int64_t width, const AdamFactors& factors,
                float* out, float* momentum) {
  F16 sum = {};
  int64_t alive = 0;
  each_vector(length, length, [&](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 v = load(variance + i, count);
    sum += v;
    alive += __builtin_popcount(gather(v > splat(0.0f)));
  });
  float mean = total(sum) / static_cast<float>(alive > 0 ? alive : 1);
  float least = factors.nu_floor * mean;
  float corrected = scale / factors.m_correction;
  float decay = has_decay ? factors.weight_decay : 0.0f;
  each_vector(length, length, [=](int64_t i, int64_t count) SFPO_INLINE_BODY {
    F16 v = load(variance + i, count);
    U16 negative = spread(load_word(signs, i, width));
    float m[kLanes], vs[kLanes], u[kLanes];
    F16 signed_m = with_signs(corrected, negative);
    store(m, signed_m);
    store(vs, v);
    for (int64_t j = 0; j < kLanes; ++j) {
      u[j] = direction(m[j], vs[j], least, factors.v_correction, factors.eps);
    }
    F16 step = load(u);
    if (momentum != nullptr) {
      U16 live = as<uint32_t>(v > splat(0.0f));
      store(momentum + i, select(live, with_signs(scale, negative)), count);
    }
    if (parameters != nullptr) {
      F16 p = load(parameters + i, count);
      if (has_decay) step += splat(decay) * p;
      step = p - splat(factors.learning_rate) * step;
    }
    store(out + i, step, count);
  });
}

}  // namespace sfpo
