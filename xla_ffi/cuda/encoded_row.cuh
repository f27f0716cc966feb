// What the encoders share: entries to signs, a scale, and what is lost of them.
#pragma once

#include "core/sign.h"
#include "cuda/rows.cuh"

namespace sfpo {

// A row as it is encoded. Entries are given in order, a quad a lane; then `scale_of_warp`
// makes the scale; then `write_lost` the errors. What is kept of the entries between the two
// is in `tile`; of rows wider than it, in the errors' own memory.
class EncodedRow {
 public:
  __device__ __forceinline__ EncodedRow(Tile* tile, float* error, int length, int width,
                                        bool aligned)
      : tile_(tile), error_(error), length_(length), width_(width), aligned_(aligned) {}

  // `alive` has a bit for each entry of `c`. Returns the sign bits.
  __device__ __forceinline__ uint32_t take(int entry, const Quad& c, uint32_t alive) {
    if (entry >= width_) return 0;
    uint32_t negative = 0;
    Quad kept;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      uint32_t bits = to_bits(c.at[j]);
      negative |= (bits >> 31) << j;
      kept.at[j] = (alive >> j & 1) != 0 ? c.at[j] : 0.0f;
    }
    int place = entry % kTile;
    store_quad(tile_->at, place, kTile, true, kept);
    alive_ |= static_cast<uint64_t>(alive) << (kQuad * (place / kStep));
    count_ += __popc(alive);
    if (is_wide() && error_ != nullptr) store_quad(error_, entry, length_, aligned_, kept);
    return negative;
  }

  // After the last entry of each tile.
  __device__ __forceinline__ void end_tile_of_warp(int entries) {
    sum_.add_by_warp(*tile_, entries, ~kSignBit);
  }

  __device__ __forceinline__ float scale_of_warp(float relaxation) const {
    int live = __reduce_add_sync(kAllLanes, count_);
    return block_scale(sum_.total_of_warp(), live, relaxation);
  }

  // c - (+-scale) where live, else 0. `alive(entry)` tells again which entries of a quad are;
  // it is asked of wide rows alone.
  template <typename Alive>
  __device__ __forceinline__ void write_lost(float scale, const Alive& alive) const {
    if (error_ == nullptr) return;
    for (int entry = kQuad * lane_id(); entry < length_; entry += kStep) {
      Quad c;
      uint32_t live;
      if (is_wide()) {
        c = load_quad(error_, entry, length_, aligned_);
        live = alive(entry);
      } else {
        c = load_quad(tile_->at, entry, kTile, true);
        live = static_cast<uint32_t>(alive_ >> (kQuad * (entry / kStep)));
      }
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float lost = c.at[j] - signed_scale(scale, to_bits(c.at[j]));
        c.at[j] = (live >> j & 1) != 0 ? lost : 0.0f;
      }
      store_quad(error_, entry, length_, aligned_, c);
    }
  }

 private:
  __device__ __forceinline__ bool is_wide() const { return width_ > kTile; }

  Tile* tile_;
  float* error_;
  int length_;
  int width_;
  bool aligned_;
  RowSum sum_;
  uint64_t alive_ = 0;  // this lane's entries of the tile, four bits a step
  int count_ = 0;
};

}  // namespace sfpo
