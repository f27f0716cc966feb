// What is kept of entries, and what is not.
#pragma once

#include <cstdint>

namespace sfpo {

// Of s = x + residual, or x where `residual` is null, writes to `kept` the entries whose key
// is above `limit`, and to `dropped`, where it is not null, the others; zero elsewhere. Returns
// how many are kept. `dropped` may be the residual.
int64_t split_entries(const float* x, const float* residual, int64_t count, int32_t limit,
                      float* kept, float* dropped);

}  // namespace sfpo
