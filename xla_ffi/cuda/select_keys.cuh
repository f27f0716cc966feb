// Keys of a row's entries, and places among them, by a warp or a block.
#pragma once

#include "core/select.h"
#include "cuda/magnitude_threshold.h"
#include "cuda/small_quads.cuh"

namespace sfpo {

inline constexpr int kBlockThreads = 256;
inline constexpr int kBlockWarps = kBlockThreads / kWarpSize;

// Keys are of 31 bits; those of 16-bit entries are their upper ones.
inline constexpr int kHalfShift = 16;

// -1 stands for an entry that may not be kept, and for none.
struct KeyQuad {
  int32_t at[kQuad];
};

// Entries of a row from some on.
struct Keys {
  const void* x;
  const float* addend;
  const uint8_t* live;
  int length;
  bool is_half;
  bool aligned;

  __device__ __forceinline__ Keys(const SelectJob& job, int64_t start, int length)
      : addend(job.addend != nullptr ? job.addend + start : nullptr),
        live(job.live != nullptr ? job.live + start : nullptr),
        length(length),
        is_half(job.is_half) {
    x = static_cast<const char*>(job.x) + start * (is_half ? 2 : 4);
    aligned = is_aligned(x, addend);
  }

  __device__ __forceinline__ KeyQuad quad(int entry) const {
    KeyQuad keys = {{-1, -1, -1, -1}};
    if (entry >= length) return keys;
    if (is_half) {
      auto halves = load_quad_of(static_cast<const uint16_t*>(x), entry, length);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) keys.at[j] = (halves.at[j] & kShortKeyMask) << kHalfShift;
    } else {
      Quad s = load_quad(static_cast<const float*>(x), entry, length, aligned);
      Quad a = load_quad(addend, entry, length, aligned);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float sum = addend != nullptr ? s.at[j] + a.at[j] : s.at[j];
        keys.at[j] = static_cast<int32_t>(to_bits(sum) & kKeyMask);
      }
    }
    QuadOf<uint8_t> alive = {{1, 1, 1, 1}};
    if (live != nullptr) alive = load_quad_of(live, entry, length);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (entry + j >= length || alive.at[j] == 0) keys.at[j] = -1;
    }
    return keys;
  }

  __device__ __forceinline__ int32_t one(int entry) const {
    if (live != nullptr && live[entry] == 0) return -1;
    if (is_half) {
      return (static_cast<const uint16_t*>(x)[entry] & kShortKeyMask) << kHalfShift;
    }
    float sum = static_cast<const float*>(x)[entry];
    if (addend != nullptr) sum += addend[entry];
    return static_cast<int32_t>(to_bits(sum) & kKeyMask);
  }
};

// Writes a row's selection; one thread calls it.
__device__ __forceinline__ void write_selection(const SelectJob& job, int64_t row,
                                                uint32_t threshold, uint32_t end) {
  bool is_short = job.is_half && threshold <= kKeyMask;
  job.threshold[row] = is_short ? threshold >> kHalfShift : threshold;
  job.end[row] = end;
}

// Of items with counts: the one in which an entry of some rank is.
struct Located {
  uint32_t item;
  uint32_t before;  // entries in the items before it
  uint32_t count;   // entries in it
  uint32_t total;   // entries in all; a rank beyond them, and rank 0, is in no item
};

// By a block: where the `rank`-th entry is, from 1 on, of items 0, 1, ... with `count(item)`
// entries. Each thread has some of them in a row. All threads have read what `count` reads when
// it returns.
template <typename Count>
__device__ __forceinline__ Located locate_by_block(uint32_t rank, uint32_t items,
                                                   const Count& count) {
  __shared__ uint32_t warps[kBlockWarps];
  __shared__ Located found;
  uint32_t each = (items + kBlockThreads - 1) / kBlockThreads;
  uint32_t item = min(each * threadIdx.x, items), end = min(item + each, items);
  uint32_t own = 0;
  for (uint32_t i = item; i < end; ++i) own += count(i);
  uint32_t sum = own;
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) {
    uint32_t other = __shfl_up_sync(kAllLanes, sum, apart);
    if (lane_id() >= apart) sum += other;
  }
  if (lane_id() == kWarpSize - 1) warps[warp_id()] = sum;
  __syncthreads();
  uint32_t before = sum - own, total = 0;
#pragma unroll
  for (int i = 0; i < kBlockWarps; ++i) {
    if (i < warp_id()) before += warps[i];
    total += warps[i];
  }
  if (threadIdx.x == 0 && (total < rank || rank == 0)) found = {items, total, 0, total};
  if (before < rank && rank - before <= own) {
    uint32_t here = count(item);
    while (rank - before > here) {
      before += here;
      here = count(++item);
    }
    found = {item, before, here, total};
  }
  __syncthreads();
  return found;
}

// By a block: the place among `keys` of the one equal to `key` with `before` of them before
// it; their number where there is none.
__device__ __forceinline__ uint32_t find_tie_by_block(const Keys& keys, int32_t key,
                                                      uint32_t before) {
  return locate_by_block(before + 1, keys.length,
                         [&](uint32_t i) -> uint32_t { return keys.one(i) == key; })
      .item;
}

}  // namespace sfpo
