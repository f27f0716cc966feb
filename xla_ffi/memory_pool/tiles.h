// The blocks of the pool and the holes between them, in the order of their addresses.
#pragma once

#include <cstdint>
#include <vector>

#include "memory_pool/page_map.h"

namespace sfpo::pool {

enum class Kind : uint8_t {
  spare,    // of the table only
  hole,     // free bytes of a page that is in use
  live,     // a block
  waiting,  // a block that is freed when a stream comes so far
  kept,     // the block that was freed last, still whole
};

// A piece of pages in use. Tiles cover runs of pages without gaps; `before` and `after` are the
// neighbours, and kNone where the run ends, which is always at the edge of a page.
struct Tile {
  uint64_t offset = 0;
  uint64_t size = 0;
  uint64_t requested = 0;  // of a block, as it was asked for
  uint32_t before = kNone;
  uint32_t after = kNone;
  uint32_t bin_before = kNone;  // holes of about the same size
  uint32_t bin_after = kNone;
  uint32_t bin = kNone;
  uint32_t owner = kNone;  // of a movable block, its entry among the handles
  Kind kind = Kind::spare;
  bool is_last = false;  // of a hole in a bin, that it ended its run as it came there

  uint64_t end() const { return offset + size; }
};

// The table they lie in. A tile is named by its place, for the table grows.
class Tiles {
 public:
  Tile& operator[](uint32_t id) { return tiles_[id]; }
  const Tile& operator[](uint32_t id) const { return tiles_[id]; }
  uint32_t size() const { return static_cast<uint32_t>(tiles_.size()); }

  // With so many blocks no call below can fail. May throw std::bad_alloc.
  void prepare(uint64_t blocks) {
    // A run of pages has a block in it, and two blocks one hole between them at most.
    while (tiles_.size() < 3 * blocks + 4) {
      tiles_.emplace_back();
      drop(size() - 1);
    }
  }

  uint32_t make(uint64_t offset, uint64_t size) {
    uint32_t id = spare_;
    spare_ = tiles_[id].after;
    tiles_[id] = Tile();
    tiles_[id].offset = offset;
    tiles_[id].size = size;
    tiles_[id].kind = Kind::hole;
    return id;
  }

  void drop(uint32_t id) {
    tiles_[id] = Tile();
    tiles_[id].after = spare_;
    spare_ = id;
  }

  // Cuts a tile in two at an offset inside it; returns the second part.
  uint32_t cut(uint32_t id, uint64_t offset) {
    uint32_t second = make(offset, tiles_[id].end() - offset);
    tiles_[id].size = offset - tiles_[id].offset;
    link(second, tiles_[id].after);
    link(id, second);
    return second;
  }

  // Joins a tile with the one after it.
  void join_after(uint32_t id) {
    uint32_t second = tiles_[id].after;
    tiles_[id].size += tiles_[second].size;
    link(id, tiles_[second].after);
    drop(second);
  }

  void link(uint32_t first, uint32_t second) {
    if (first != kNone) tiles_[first].after = second;
    if (second != kNone) tiles_[second].before = first;
  }

 private:
  std::vector<Tile> tiles_;
  uint32_t spare_ = kNone;
};

}  // namespace sfpo::pool
