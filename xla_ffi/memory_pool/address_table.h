// From a block's offset to its tile: open addressing with linear probing.
#pragma once

#include <cstdint>
#include <vector>

#include "memory_pool/page_map.h"

namespace sfpo::pool {

class AddressTable {
 public:
  explicit AddressTable(uint64_t unit) : unit_(unit), entries_(64) {}

  uint32_t find(uint64_t offset) const {
    for (uint64_t i = place(offset);; i = (i + 1) & mask()) {
      if (entries_[i].tile == kNone || entries_[i].offset == offset) return entries_[i].tile;
    }
  }

  // One more can be inserted without a chance of failing. May throw std::bad_alloc.
  void prepare(uint64_t count) {
    if (2 * (size_ + count) <= entries_.size()) return;
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    size_ = 0;
    for (const Entry& entry : old) {
      if (entry.tile != kNone) insert(entry.offset, entry.tile);
    }
    prepare(count);
  }

  void insert(uint64_t offset, uint32_t tile) {
    uint64_t i = place(offset);
    while (entries_[i].tile != kNone) i = (i + 1) & mask();
    entries_[i] = {offset, tile};
    ++size_;
  }

  void erase(uint64_t offset) {
    uint64_t hole = place(offset);
    while (entries_[hole].offset != offset || entries_[hole].tile == kNone) {
      hole = (hole + 1) & mask();
    }
    // What comes later in the chain moves up, unless that were before its own place.
    for (uint64_t i = hole;;) {
      i = (i + 1) & mask();
      if (entries_[i].tile == kNone) break;
      uint64_t wanted = place(entries_[i].offset);
      if (((i - wanted) & mask()) < ((i - hole) & mask())) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = Entry();
    --size_;
  }

 private:
  struct Entry {
    uint64_t offset = 0;
    uint32_t tile = kNone;
  };

  uint64_t mask() const { return entries_.size() - 1; }
  // Fibonacci hashing: blocks lie at regular distances.
  uint64_t place(uint64_t offset) const {
    return ((offset / unit_) * 0x9E3779B97F4A7C15u >> 32) & mask();
  }

  uint64_t unit_;
  std::vector<Entry> entries_;  // a power of two of them, half full at most
  uint64_t size_ = 0;
};

}  // namespace sfpo::pool
