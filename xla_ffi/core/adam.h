// Adam with a frozen variance and the momentum of one bit (Tang et al. 2021).
//
//     u = (m / m_correction) / (sqrt(max(v, floor * mean v) / v_correction) + eps)
//
// where v > 0, else 0; the mean is over the live entries of a block.
#pragma once

#include <cmath>

#include "core/portable.h"

namespace sfpo {

// As the handlers are given them, six floats.
struct AdamFactors {
  float m_correction;  // 1 - b1^t
  float v_correction;  // 1 - b2^W
  float eps;
  float nu_floor;       // share of a block's mean variance that v counts as at least
  float learning_rate;  // where parameters are updated
  float weight_decay;   // likewise
};

// `corrected_m` is m / m_correction, `least` the smallest v that counts.
SFPO_INLINE float direction(float corrected_m, float v, float least, float v_correction,
                            float eps) {
  float raised = v < least ? least : v;
  float u = corrected_m / (sqrtf(raised / v_correction) + eps);
  return v > 0.0f ? u : 0.0f;
}

}  // namespace sfpo
