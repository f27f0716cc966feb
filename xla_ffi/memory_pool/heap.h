// Blocks placed in pages: pages come when a block needs them, and go when nothing lies in them.
#pragma once

#include <cstdint>
#include <optional>

#include "memory_pool/bins.h"
#include "memory_pool/page_map.h"
#include "memory_pool/tiles.h"

namespace sfpo::pool {

class Heap {
 public:
  // `limit` and `cache` in pages.
  Heap(Pages& pages, uint64_t page, uint32_t limit, uint32_t cache, std::optional<uint8_t> poison)
      : page_(page),
        unit_(pages.alignment()),
        map_(pages, limit, cache, poison),
        bins_(tiles_, unit_) {}

  Code reserve() { return map_.reserve(page_); }

  // A live tile of `size` bytes, a multiple of the unit, at a multiple of `alignment`: in the
  // hole that fits, or in new pages, whose rest is a hole. OUT_OF_MEMORY, without a message,
  // where there are not enough. May throw std::bad_alloc, before anything has changed.
  Code place(uint64_t size, uint64_t alignment, uint32_t* id);
  // The same in holes alone; kNone where none fits. A search that is not thorough may miss one
  // of nearly the same size. `tiles().prepare` is the caller's to call.
  uint32_t place_in_hole(uint64_t size, uint64_t alignment, bool is_thorough);
  // Makes a hole of a tile, and gives back the pages that are free with it.
  void release(uint32_t id);

  // Holes that touch the page are not used, or are used again.
  void withhold(uint32_t first, uint64_t page_begin, bool is_withheld);
  // The first of the tiles around `id` that touch its page.
  uint32_t first_in_page(uint32_t id, uint64_t page_begin) const;

  // Of the largest block that can be placed.
  uint64_t largest() const;
  uint64_t page() const { return page_; }
  uint64_t unit() const { return unit_; }
  uint64_t in_use() const { return in_use_; }
  uint64_t blocks() const { return blocks_; }
  Tiles& tiles() { return tiles_; }
  const Tiles& tiles() const { return tiles_; }
  PageMap& map() { return map_; }
  const PageMap& map() const { return map_; }

 private:
  // Makes a block of a part of a hole that is in no bin, and holes of what is left.
  uint32_t carve(uint32_t hole, uint64_t size, uint64_t alignment);

  uint64_t page_;
  uint64_t unit_;
  uint64_t in_use_ = 0;
  uint64_t blocks_ = 0;
  PageMap map_;
  Tiles tiles_;
  Bins bins_;
};

}  // namespace sfpo::pool
