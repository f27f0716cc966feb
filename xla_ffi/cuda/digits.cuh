// Digits of keys, counted by a block in shared memory: 11, 10 and 10 bits, the highest first.
#pragma once

#include "cuda/select_keys.cuh"

namespace sfpo {

inline constexpr int kPasses = 3;
inline constexpr int kHalfPasses = 2;  // the third has nothing but zeros
inline constexpr int kMostBins = 1 << 11;

struct Digit {
  int shift;
  int above;  // the first bit above it

  __device__ __forceinline__ explicit Digit(int pass)
      : shift(10 * (kPasses - 1 - pass)), above(pass == 0 ? 31 : shift + 10) {}

  __device__ __forceinline__ int bins() const { return 1 << (above - shift); }

  // Whether what is above the digit is as in `prefix`; false for -1.
  __device__ __forceinline__ bool matches(int32_t key, uint32_t prefix) const {
    return key >> above == static_cast<int32_t>(prefix) >> above;
  }

  __device__ __forceinline__ int of(int32_t key) const { return (key >> shift) & (bins() - 1); }
};

struct Bins {
  uint32_t at[kMostBins];

  __device__ __forceinline__ void clear_by_block() {
    for (int i = threadIdx.x; i < kMostBins; i += kBlockThreads) at[i] = 0;
    __syncthreads();
  }

  // Adds the digits of those keys that have the prefix.
  __device__ __forceinline__ void count_by_block(const Keys& keys, Digit digit, uint32_t prefix) {
    constexpr int kAll = kQuad * kBlockThreads;
    for (int step = 0; step < keys.length; step += kUnroll * kAll) {
      int first = step + kQuad * threadIdx.x;
      KeyQuad quads[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) quads[u] = keys.quad(first + u * kAll);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) add(quads[u], digit, prefix);
    }
    __syncthreads();
  }

 private:
  // Equal neighbours are added as one: of zeros, the most common, a quarter are left to
  // wait for each other.
  __device__ __forceinline__ void add(const KeyQuad& quad, Digit digit, uint32_t prefix) {
    int run = 0;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      run += digit.matches(quad.at[j], prefix);
      bool is_last = j + 1 == kQuad || quad.at[j + 1 < kQuad ? j + 1 : j] != quad.at[j];
      if (is_last && run > 0) {
        atomicAdd(&at[digit.of(quad.at[j])], static_cast<uint32_t>(run));
        run = 0;
      }
    }
  }
};

// What is known of a threshold.
struct Search {
  uint32_t prefix;   // its upper bits
  uint32_t missing;  // its rank among the entries that have them
  uint32_t equal;    // how many of those there are
};

// What is to be kept of a row.
enum class Kept { kSome, kAll, kNone };

// By a block: one digit more, by the counts of `bin(digit)`. The first one tells whether some
// are kept at all; if not, nothing is changed.
template <typename Bin>
__device__ __forceinline__ Kept narrow_by_block(Search* search, Digit digit, bool is_first,
                                                const Bin& bin) {
  uint32_t bins = digit.bins();
  Located found =
      locate_by_block(search->missing, bins, [&](uint32_t i) { return bin(bins - 1 - i); });
  if (is_first && search->missing >= found.total) return Kept::kAll;
  if (is_first && search->missing == 0) return Kept::kNone;
  search->prefix |= (bins - 1 - found.item) << digit.shift;
  search->missing -= found.before;
  search->equal = found.count;
  return Kept::kSome;
}

// What can be said of a row that nobody has looked at.
__device__ __forceinline__ Kept kept_of(const SelectJob& job, uint32_t wanted) {
  if (wanted >= job.width) return Kept::kAll;
  return wanted == 0 && job.live == nullptr ? Kept::kNone : Kept::kSome;
}

// By one thread: all of a row, or nothing.
__device__ __forceinline__ void write_plain(const SelectJob& job, int64_t row, Kept kept) {
  uint32_t threshold = kept == Kept::kAll ? 0 : kKeepNothing;
  write_selection(job, row, threshold, static_cast<uint32_t>(job.width));
}

}  // namespace sfpo
