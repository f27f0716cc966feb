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
  static constexpr uint32_t kLooks = 16;
  static constexpr uint32_t kAll = UINT32_MAX;

  // `limit` and `cache` in pages.
  Heap(Pages& pages, uint64_t page, uint32_t limit, uint32_t cache, std::optional<uint8_t> poison)
      : page_(page),
        unit_(pages.alignment()),
        map_(pages, limit, cache, poison),
        inner_(tiles_, unit_),
        last_(tiles_, unit_) {}

  Code reserve() { return map_.reserve(page_); }

  // A live tile of `size` bytes, a multiple of the unit, at a multiple of `alignment`: in the
  // hole that fits, or beginning in the hole at the end of a run, with pages behind it, or in a
  // new run, whose rest is a hole. OUT_OF_MEMORY, without a message,
  // where there are not enough. May throw std::bad_alloc, before anything has changed.
  Code place(uint64_t size, uint64_t alignment, uint32_t* id);
  // The same in holes alone; kNone where none fits, or is among the first few that are
  // looked at. `tiles().prepare` is the caller's to call.
  uint32_t place_in_hole(uint64_t size, uint64_t alignment, uint32_t looks = kLooks);
  // For a copy of a block: begins in the last hole of a run, if that takes fewer pages than the
  // block has for itself. kNone where there is no such place.
  Code place_tighter(uint32_t id, uint32_t* place);
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
  // Begins in the last hole of a run where that saves a page.
  Code place_at_end(uint64_t size, uint64_t alignment, uint32_t looks, uint32_t* id);
  uint64_t own_pages(uint32_t id) const;
  Code grow(uint32_t hole, uint64_t size, uint32_t* id);
  // The largest hole at the end of a run that can grow by all pages that are free.
  uint32_t largest_growing() const;
  void insert(uint32_t hole);
  void remove(uint32_t hole);
  // Makes a block of a part of a hole that is in no bin, and holes of what is left.
  uint32_t carve(uint32_t hole, uint64_t size, uint64_t alignment);

  uint64_t page_;
  uint64_t unit_;
  uint64_t in_use_ = 0;
  uint64_t blocks_ = 0;
  PageMap map_;
  Tiles tiles_;
  Bins inner_, last_;  // holes between blocks, and holes at the ends of runs
};

}  // namespace sfpo::pool
