// Passes over keys, a block at a time. A block's keys stay in the first-level cache, whatever
// they are made from; -1 stands for an entry that may not be kept, and fills up a block.
#pragma once

#include <cstdint>

namespace sfpo {

// A multiple of the lanes of a vector.
inline constexpr int64_t kBlockEntries = 4096;

// What keys are made from.
struct KeySource {
  const void* x;                  // float32, bfloat16 or float16
  int64_t item;                   // bytes of one: 4 or 2
  int64_t size;                   // entries of a row
  const float* addend = nullptr;  // added to float32 entries before the sign is cleared
  const uint8_t* live = nullptr;  // entries that may be kept; null: all

  // The row that starts at this entry.
  KeySource from(int64_t start) const;
  int32_t key(int64_t entry) const;
};

// Writes the keys of `count` entries from `start` on, then -1 up to a multiple of 16.
void make_keys(const KeySource& from, int64_t start, int64_t count, int32_t* keys);

// The k-th largest of `count` keys, k >= 1, a multiple of 16 of them being readable, of which
// those beyond `count` are -1. It must lie in [low, high].
int32_t kth_largest(const int32_t* keys, int64_t count, int64_t k, int32_t low, int32_t high);

// The smallest and the largest key that is not -1; there must be one.
void key_range(const int32_t* keys, int64_t count, int32_t* low, int32_t* high);

int64_t count_above(const int32_t* keys, int64_t count, int32_t key);
int64_t count_equal(const int32_t* keys, int64_t count, int32_t key);

// The place of the key equal to this one that has `before` of them before it.
int64_t find_equal(const int32_t* keys, int64_t count, int32_t key, int64_t before);

// How the keys of a block lie to the bracket [low, high].
struct BracketCounts {
  int32_t above = 0;
  int32_t at_high = 0;
  int32_t at_low = 0;
  int32_t within = 0;  // above `low` and below `high`
};

// Counts, and writes what is within to `out`, which has room for a block.
BracketCounts split_by_bracket(const int32_t* keys, int64_t count, int32_t low, int32_t high,
                               int32_t* out);

// Adds the digits of those keys that lie in [low, high] to `bins`.
void count_digits(const int32_t* keys, int64_t count, int32_t low, int32_t high, int shift,
                  uint32_t* bins);

int64_t count_live(const uint8_t* live, int64_t count);

}  // namespace sfpo
