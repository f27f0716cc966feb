#include "cpu/sparsify_rows.h"

#include "core/select.h"
#include "cpu/simd.h"

namespace sfpo {

SFPO_CLONES
int64_t split_entries(const float* x, const float* residual, int64_t count, int32_t limit,
                      float* kept, float* dropped) {
  I16 found = {}, bound = splat(limit);
  each_vector(count, count, [&](int64_t i, int64_t here) SFPO_INLINE_BODY {
    F16 s = load(x + i, here);
    if (residual != nullptr) s += load(residual + i, here);
    I16 is_kept = as<int32_t>(as_bits(s) & splat(kKeyMask)) > bound;
    U16 mask = as<uint32_t>(is_kept);
    store(kept + i, select(mask, s), here);
    if (dropped != nullptr) store(dropped + i, select(~mask, s), here);
    if (here < kLanes) is_kept &= as<int32_t>(spread((1u << here) - 1));
    found -= is_kept;
  });
  return sum_of(found);
}

}  // namespace sfpo
