#include "cpu/sparsify_rows.h"

#include <algorithm>

#include "core/select.h"
#include "cpu/simd.h"

namespace sfpo {

SFPO_CLONES
int64_t split_entries(const float* x, const float* residual, int64_t count, int32_t limit,
                      float* kept, float* dropped) {
  I16 found = {}, bound = I16{} + limit;
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t here = std::min(kLanes, count - i);
    F16 s = load(x + i, here);
    if (residual != nullptr) s += load(residual + i, here);
    I16 is_kept = reinterpret_cast<I16>(as_bits(s) & (U16{} + kKeyMask)) > bound;
    U16 mask = reinterpret_cast<U16>(is_kept);
    store(kept + i, select(mask, s), here);
    if (dropped != nullptr) store(dropped + i, select(~mask, s), here);
    if (here < kLanes) is_kept &= reinterpret_cast<I16>(spread((1u << here) - 1));
    found -= is_kept;
  }
  int64_t total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += found[i];
  return total;
}

}  // namespace sfpo
