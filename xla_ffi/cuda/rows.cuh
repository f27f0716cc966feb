// A row by one warp: where it is, its entries in fours, its bits, its sum.
//
// Lane t has entries 4t to 4t + 3 of each 128: a warp reads 512 bytes at once, and two lanes
// have a byte of bits. Every lane of a warp calls every function that has Warp in its name.
#pragma once

#include <cstdint>

#include "core/portable.h"
#include "cuda/row_table.h"

namespace sfpo {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kQuad = 4;
inline constexpr int kStep = kQuad * kWarpSize;  // entries that a warp has at once
// Entries that a warp keeps in shared memory, with their bits in 64 bits of each lane; of
// wider rows they are read again.
inline constexpr int kTile = 16 * kStep;
// Two steps are read before the first is used: enough in flight to hide the memory's latency.
inline constexpr int kUnroll = 2;

struct Tile {
  alignas(16) float at[kTile];
};

struct Quad {
  float at[kQuad];
};

// A place in a table: a job, and one of its rows.
struct RowPlace {
  int job;  // -1: this warp has none
  int64_t row;
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }

__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }

// The place of a row by its number among all rows of the table.
template <typename Job>
__device__ __forceinline__ RowPlace find_row(const RowTable<Job>& table, uint32_t number) {
  int low = 0, high = table.count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (number < table.ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == table.count) return {-1, 0};
  return {low, number - (low > 0 ? table.ends[low - 1] : 0)};
}

// This warp's.
template <typename Job>
__device__ __forceinline__ RowPlace find_row(const RowTable<Job>& table) {
  return find_row(table, blockIdx.x * kWarps + warp_id());
}

// Entries of a row `width` wide that begins `start` entries into an array of `length`.
__device__ __forceinline__ int live_length(int64_t length, int64_t start, int width) {
  int64_t rest = length - start;
  return rest < 0 ? 0 : static_cast<int>(rest < width ? rest : width);
}

// Whether all of these may be read and written sixteen bytes at a time; null pointers may.
template <typename... Pointers>
__device__ __forceinline__ bool is_aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
}

// Four entries of a row of `length`, zeros beyond it and where there is no array.
__device__ __forceinline__ Quad load_quad(const float* row, int entry, int length, bool aligned) {
  Quad quad = {};
  if (row == nullptr) return quad;
  if (aligned && entry + kQuad <= length) {
    float4 four = *reinterpret_cast<const float4*>(row + entry);
    return {four.x, four.y, four.z, four.w};
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (entry + j < length) quad.at[j] = row[entry + j];
  }
  return quad;
}

__device__ __forceinline__ void store_quad(float* row, int entry, int length, bool aligned,
                                           const Quad& quad) {
  if (aligned && entry + kQuad <= length) {
    *reinterpret_cast<float4*>(row + entry) =
        make_float4(quad.at[0], quad.at[1], quad.at[2], quad.at[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    if (entry + j < length) row[entry + j] = quad.at[j];
  }
}

// Four bits of a row of bits; zeros beyond its width.
__device__ __forceinline__ uint32_t load_nibble(const uint8_t* bits, int entry, int width) {
  if (entry >= width) return 0;
  return (bits[entry / 8] >> (entry & 4)) & 15u;
}

// Bit j of `nibble`, as bit 31.
__device__ __forceinline__ uint32_t as_sign(uint32_t nibble, int j) { return nibble << (31 - j); }

// Writes the four bits of each lane; a width is a multiple of eight.
__device__ __forceinline__ void store_nibbles_of_warp(uint8_t* bits, int entry, int width,
                                                      uint32_t nibble) {
  uint32_t next = __shfl_xor_sync(kAllLanes, nibble, 1);
  if (entry % 8 == 0 && entry < width) bits[entry / 8] = static_cast<uint8_t>(nibble | next << 4);
}

// A sum over a row, in the order that core/sign.h gives: lane l of the first sixteen has the
// entries l, l + 16, ...
class RowSum {
 public:
  // The first `count` of `tile`, which all lanes may have written, with the bits of `mask`.
  __device__ __forceinline__ void add_by_warp(const Tile& tile, int count, uint32_t mask) {
    __syncwarp();
    if (lane_id() < kPartials) {
#pragma unroll 8
      for (int i = lane_id(); i < count; i += kPartials) {
        partial_ += from_bits(to_bits(tile.at[i]) & mask);
      }
    }
    __syncwarp();
  }

  // The total, on every lane.
  __device__ __forceinline__ float total_of_warp() const {
    float sum = partial_;
#pragma unroll
    for (int apart = kPartials / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, apart);
    }
    return __shfl_sync(kAllLanes, sum, 0);
  }

 private:
  static constexpr int kPartials = 16;

  float partial_ = 0.0f;
};

}  // namespace sfpo
