#include "cpu/select_keys.h"

#include <algorithm>

#include "core/select.h"
#include "cpu/simd.h"

namespace sfpo {
namespace {

// The keys equal to `key`, or above it. Spans keep a lane's count far from overflowing.
template <bool kIsEqual>
SFPO_INLINE int64_t count_keys(const int32_t* keys, int64_t count, int32_t key) {
  constexpr int64_t kSpan = int64_t{1} << 24;
  I16 bound = splat(key);
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += kSpan) {
    I16 sum = {}, other = {};
    int64_t end = std::min(count, start + kSpan), i = start;
    // Two sums, since one alone would wait for itself.
    for (; i + kLanes < end; i += 2 * kLanes) {
      I16 x = load(keys + i), y = load(keys + i + kLanes);
      sum += kIsEqual ? x == bound : x > bound;
      other += kIsEqual ? y == bound : y > bound;
    }
    if (i < end) {
      I16 x = load(keys + i);
      sum += kIsEqual ? x == bound : x > bound;
    }
    // A comparison sets a lane to -1.
    found -= sum_of(sum + other);
  }
  return found;
}

// The smallest key that is at least `key`, which is not negative; there must be one.
SFPO_INLINE int32_t next_up(const int32_t* keys, int64_t count, int32_t key) {
  I16 least = splat(static_cast<int32_t>(kKeyMask)), before = splat(key - 1);
  for (int64_t i = 0; i < count; i += kLanes) {
    I16 x = load(keys + i);
    least = choose((x > before) & (least > x), x, least);
  }
  int32_t lane[kLanes];
  store(lane, least);
  return *std::min_element(lane, lane + kLanes);
}

}  // namespace

KeySource KeySource::from(int64_t start) const {
  KeySource row = *this;
  row.x = static_cast<const char*>(x) + start * item;
  if (addend != nullptr) row.addend = addend + start;
  if (live != nullptr) row.live = live + start;
  return row;
}

int32_t KeySource::key(int64_t entry) const {
  if (live != nullptr && live[entry] == 0) return -1;
  if (item == 2) return static_cast<const uint16_t*>(x)[entry] & kShortKeyMask;
  float value = static_cast<const float*>(x)[entry];
  if (addend != nullptr) value += addend[entry];
  return static_cast<int32_t>(to_bits(value) & kKeyMask);
}

SFPO_CLONES
void make_keys(const KeySource& from, int64_t start, int64_t count, int32_t* keys) {
  if (from.item == 2) {
    const uint16_t* x = static_cast<const uint16_t*>(from.x) + start;
    for (int64_t i = 0; i < count; ++i) keys[i] = x[i] & kShortKeyMask;
  } else if (from.addend == nullptr) {
    const uint32_t* x = static_cast<const uint32_t*>(from.x) + start;
    for (int64_t i = 0; i < count; ++i) keys[i] = static_cast<int32_t>(x[i] & kKeyMask);
  } else {
    const float *x = static_cast<const float*>(from.x) + start, *addend = from.addend + start;
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = static_cast<int32_t>(to_bits(x[i] + addend[i]) & kKeyMask);
    }
  }
  if (from.live != nullptr) {
    const uint8_t* live = from.live + start;
    for (int64_t i = 0; i < count; ++i) keys[i] = live[i] != 0 ? keys[i] : -1;
  }
  for (int64_t i = count; i % kLanes != 0; ++i) keys[i] = -1;
}

SFPO_CLONES
int32_t kth_largest(const int32_t* keys, int64_t count, int64_t k, int32_t low, int32_t high) {
  while (low < high) {
    int32_t middle = high - (high - low) / 2;
    int64_t reached = count_keys<false>(keys, count, middle - 1);
    if (reached == k) return next_up(keys, count, middle);
    if (reached > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

SFPO_CLONES
void key_range(const int32_t* keys, int64_t count, int32_t* low, int32_t* high) {
  I16 most = splat(-1);
  for (int64_t i = 0; i < count; i += kLanes) {
    I16 x = load(keys + i);
    most = choose(x > most, x, most);
  }
  int32_t lane[kLanes];
  store(lane, most);
  *low = next_up(keys, count, 0);
  *high = *std::max_element(lane, lane + kLanes);
}

SFPO_CLONES
int64_t count_above(const int32_t* keys, int64_t count, int32_t key) {
  return count_keys<false>(keys, count, key);
}

SFPO_CLONES
int64_t count_equal(const int32_t* keys, int64_t count, int32_t key) {
  return count_keys<true>(keys, count, key);
}

SFPO_CLONES
int64_t find_equal(const int32_t* keys, int64_t count, int32_t key, int64_t before) {
  I16 bound = splat(key);
  for (int64_t i = 0; i < count; i += kLanes) {
    uint32_t word = gather(load(keys + i) == bound);
    int64_t here = __builtin_popcount(word);
    if (before < here) {
      for (; before > 0; --before) word &= word - 1;
      return i + __builtin_ctz(word);
    }
    before -= here;
  }
  return count;
}

SFPO_CLONES
BracketCounts split_by_bracket(const int32_t* keys, int64_t count, int32_t low, int32_t high,
                               int32_t* out) {
  I16 above = {}, at_high = {}, at_low = {};
  I16 lows = splat(low), highs = splat(high);
  for (int64_t i = 0; i < count; i += kLanes) {
    I16 x = load(keys + i);
    above += x > highs;
    at_high += x == highs;
    at_low += x == lows;
  }
  // Without a branch, since a few entries of a hundred are within, anywhere.
  uint32_t first = static_cast<uint32_t>(low) + 1;
  uint32_t span = high > low ? static_cast<uint32_t>(high - low) - 1 : 0;
  int32_t within = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t j = i; j < i + kLanes; ++j) {
      out[within] = keys[j];
      within += static_cast<uint32_t>(keys[j]) - first < span;
    }
  }
  return {static_cast<int32_t>(-sum_of(above)), static_cast<int32_t>(-sum_of(at_high)),
          static_cast<int32_t>(-sum_of(at_low)), within};
}

void count_digits(const int32_t* keys, int64_t count, int32_t low, int32_t high, int shift,
                  uint32_t* bins) {
  uint32_t first = static_cast<uint32_t>(low), span = static_cast<uint32_t>(high - low);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t offset = static_cast<uint32_t>(keys[i]) - first;
    if (offset <= span) ++bins[offset >> shift];
  }
}

SFPO_CLONES
int64_t count_live(const uint8_t* live, int64_t count) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += live[i] != 0;
  return found;
}

}  // namespace sfpo
