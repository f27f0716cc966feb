// The holes by size: two-level segregated fit, after M. Masmano, I. Ripoll, A. Crespo and J. Real,
// TLSF: a new dynamic memory allocator for real-time systems, ECRTS 2004. Every operation takes
// a bounded time, whatever the number of holes.
#pragma once

#include <array>
#include <cstdint>

#include "memory_pool/tiles.h"

namespace sfpo::pool {

class Bins {
 public:
  // Sizes are multiples of `unit`.
  Bins(Tiles& tiles, uint64_t unit) : tiles_(tiles), unit_(unit) { heads_.fill(kNone); }

  void insert(uint32_t id) {
    Tile& tile = tiles_[id];
    tile.bin = bin_of(tile.size);
    tile.bin_before = kNone;
    tile.bin_after = heads_[tile.bin];
    if (tile.bin_after != kNone) tiles_[tile.bin_after].bin_before = id;
    heads_[tile.bin] = id;
    fine_[tile.bin / kFine] |= 1u << (tile.bin % kFine);
    coarse_ |= uint64_t{1} << (tile.bin / kFine);
  }

  // Nothing happens to a hole that is in no bin.
  void remove(uint32_t id) {
    Tile& tile = tiles_[id];
    if (tile.bin == kNone) return;
    if (tile.bin_after != kNone) tiles_[tile.bin_after].bin_before = tile.bin_before;
    if (tile.bin_before != kNone) {
      tiles_[tile.bin_before].bin_after = tile.bin_after;
    } else {
      heads_[tile.bin] = tile.bin_after;
      if (tile.bin_after == kNone) {
        fine_[tile.bin / kFine] &= ~(1u << (tile.bin % kFine));
        if (fine_[tile.bin / kFine] == 0) coarse_ &= ~(uint64_t{1} << (tile.bin / kFine));
      }
    }
    tile.bin = tile.bin_before = tile.bin_after = kNone;
  }

  // A hole of at least `size` bytes that is accepted, smaller ones first; kNone where none is.
  // At most `looks` are looked at; in the bin that holds smaller ones too, half of these.
  template <typename Accept>
  uint32_t find(uint64_t size, uint32_t looks, Accept accept) const {
    uint32_t first = bin_of(size);
    uint32_t left = looks - looks / 2;
    for (uint32_t bin = first; bin != kNone; bin = next_bin(bin)) {
      for (uint32_t id = heads_[bin]; id != kNone && left > 0; id = tiles_[id].bin_after, --left) {
        if (tiles_[id].size >= size && accept(id)) return id;
      }
      if (bin == first) left += looks / 2;
      if (left == 0) return kNone;
    }
    return kNone;
  }

  // The largest hole; kNone where there is none at all.
  uint32_t largest() const {
    if (coarse_ == 0) return kNone;
    uint32_t row = 63 - static_cast<uint32_t>(__builtin_clzll(coarse_));
    uint32_t bin = row * kFine + 31 - static_cast<uint32_t>(__builtin_clz(fine_[row]));
    uint32_t best = heads_[bin];
    for (uint32_t id = best; id != kNone; id = tiles_[id].bin_after) {
      if (tiles_[id].size > tiles_[best].size) best = id;
    }
    return best;
  }

 private:
  static constexpr uint32_t kFine = 16;  // bins between a power of two and the next
  static constexpr uint32_t kRows = 60;

  // The next bin with a hole in it; kNone after the last.
  uint32_t next_bin(uint32_t bin) const {
    uint32_t row = bin / kFine;
    // Shifted in two steps: the last bin of a row is followed by no other.
    uint32_t finer = fine_[row] & (~uint32_t{1} << (bin % kFine));
    if (finer == 0) {
      uint64_t rows = coarse_ & (~uint64_t{1} << row);
      if (rows == 0) return kNone;
      row = static_cast<uint32_t>(__builtin_ctzll(rows));
      finer = fine_[row];
    }
    return row * kFine + static_cast<uint32_t>(__builtin_ctz(finer));
  }

  uint32_t bin_of(uint64_t size) const {
    uint64_t units = size / unit_;
    // The first row holds up to 16 units, one size a bin.
    if (units < kFine) return static_cast<uint32_t>(units);
    uint32_t log = 63 - static_cast<uint32_t>(__builtin_clzll(units));
    return (log - 3) * kFine + static_cast<uint32_t>((units >> (log - 4)) - kFine);
  }

  Tiles& tiles_;
  uint64_t unit_;
  uint64_t coarse_ = 0;
  std::array<uint32_t, kRows> fine_{};
  std::array<uint32_t, kRows * kFine> heads_;
};

}  // namespace sfpo::pool
