// Adam with a frozen variance and the momentum of one bit (Tang et al. 2021).
//
//     u = (m / m_correction) / (sqrt(max(v, floor * mean v) / v_correction) + eps)
//
// where v > 0, else 0; the mean is over the live entries of a block.
#pragma once

#include <cmath>

#include "core/portable.h"

namespace sfpo {

// `corrected_m` is m / m_correction, `least` the smallest v that counts.
SFPO_INLINE float direction(float corrected_m, float v, float least, float v_correction,
                            float eps) {
  float raised = v < least ? least : v;
  float u = corrected_m / (sqrtf(raised / v_correction) + eps);
  return v > 0.0f ? u : 0.0f;
}

}  // namespace sfpo
