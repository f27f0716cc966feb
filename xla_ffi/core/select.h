// The k largest magnitudes of a row, exactly: which entries they are, and how to find them.
//
// A magnitude is its bits without the sign, an unsigned integer of the same order; a NaN is
// larger than infinity. A row's selection is two numbers: the entries above a threshold are
// kept, and those equal to it that come before an end.
//
// The threshold of a long row takes one pass: the order statistics of a sample bracket it,
// the pass counts what is above the bracket and gathers what is within, and the rest is
// decided among that. Where the bracket misses, or holds too much, digits of 11 bits decide.
#pragma once

#include <cmath>

#include "core/portable.h"

namespace sfpo {

inline constexpr uint32_t kKeyMask = 0x7fffffffu;
inline constexpr uint16_t kShortKeyMask = 0x7fffu;  // of bfloat16 and float16

// Above every key: nothing is kept.
inline constexpr uint32_t kKeepNothing = 0xffffffffu;

// Entries are kept whose key is above this. Keys are below 2^31, so that signed comparisons,
// which vector units have, serve as well as unsigned ones.
SFPO_INLINE int32_t limit_of(uint32_t threshold, bool is_before_end) {
  if (threshold > kKeyMask) return static_cast<int32_t>(kKeyMask);
  return static_cast<int32_t>(threshold) - (is_before_end ? 1 : 0);
}

// A sample has 2^bits entries, about n^(2/3): taking it and deciding among what the bracket
// holds then cost alike. Of very long rows both are little beside the pass.
SFPO_INLINE int sample_bits(int64_t size) {
  constexpr int kLeast = 8, kMost = 14;
  double square = static_cast<double>(size) * static_cast<double>(size);
  int bits = kLeast;
  while (bits < kMost && static_cast<double>(int64_t{1} << (3 * bits)) < square) ++bits;
  return bits;
}

// One entry of each of as many strides of the row, anywhere within: no period of the data
// meets the strides. Needs 2^bits <= `size` < 2^32.
SFPO_INLINE int64_t sample_position(int64_t sample, int bits, int64_t size) {
  uint64_t hash = (static_cast<uint64_t>(sample) + 1) * 0x9e3779b97f4a7c15ull >> 32;
  uint64_t stride = static_cast<uint64_t>(size) >> bits;
  return ((sample * size) >> bits) + static_cast<int64_t>((hash * stride) >> 32);
}

// Ranks in a sorted sample, the largest first, between which the threshold lies but for one
// row in ten thousand: four standard deviations, and a few entries where those are none.
struct SampleRanks {
  int64_t high;  // below 1: no bound
  int64_t low;   // above `samples`: no bound
};

SFPO_INLINE SampleRanks sample_ranks(int64_t count, int64_t size, int64_t samples) {
  double share = static_cast<double>(count) / static_cast<double>(size);
  double rank = share * static_cast<double>(samples);
  double margin = 4.0 * std::sqrt(rank * (1.0 - share)) + 4.0;
  return {static_cast<int64_t>(std::floor(rank - margin)),
          static_cast<int64_t>(std::ceil(rank + margin))};
}

// On a GPU rows of more entries than this are each shared by many blocks, a chunk a block,
// and have a workspace: `kRowWords` numbers, and one a chunk. Python knows these, too.
inline constexpr int64_t kMostOfBlock = int64_t{1} << 15;
inline constexpr int64_t kRowChunk = int64_t{1} << 14;
inline constexpr int64_t kRowWords = 2052;

SFPO_INLINE int64_t row_chunks(int64_t width) {
  return width > kMostOfBlock ? (width + kRowChunk - 1) / kRowChunk : 0;
}

SFPO_INLINE int64_t row_words(int64_t width) {
  int64_t chunks = row_chunks(width);
  return chunks > 0 ? kRowWords + chunks : 0;
}

inline constexpr int kDigitBits = 11;
inline constexpr int64_t kDigits = 1 << kDigitBits;

// The shift by which keys of [low, high], less `low`, become digits.
SFPO_INLINE int digit_shift(int32_t low, int32_t high) {
  int shift = 0;
  while (((high - low) >> shift) >= kDigits) ++shift;
  return shift;
}

}  // namespace sfpo
