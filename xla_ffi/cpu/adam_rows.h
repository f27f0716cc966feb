// The update of Adam, a row of packed momentum at a time.
#pragma once

#include <cstdint>

#include "core/adam.h"

namespace sfpo {

// Writes the directions u of `length` entries, and their momentum where `momentum` is not
// null. With `parameters` the result is parameters - learning_rate * (u + decay * parameters)
// instead; `out` may be the same buffer.
void onebit_row(const uint8_t* signs, float scale, const float* variance, const float* parameters,
                bool has_decay, int64_t length, int64_t width, const AdamFactors& factors,
                float* out, float* momentum);

}  // namespace sfpo
