#include "memory_pool/heap.h"

#include <algorithm>

namespace sfpo::pool {
namespace {

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Code Heap::place(uint64_t size, uint64_t alignment, uint32_t* id) {
  tiles_.prepare(blocks_ + 1);
  *id = place_in_hole(size, alignment, false);
  if (*id != kNone) return SFPO_POOL_OK;
  uint64_t count = (size + page_ - 1) / page_;
  uint32_t first = 0;
  Code code = count > map_.limit() ? SFPO_POOL_OUT_OF_MEMORY
                                   : map_.acquire(static_cast<uint32_t>(count), &first);
  if (code == SFPO_POOL_OUT_OF_MEMORY) *id = place_in_hole(size, alignment, true);
  if (*id != kNone) return SFPO_POOL_OK;
  if (code != SFPO_POOL_OK) return code;
  *id = carve(tiles_.make(first * page_, count * page_), size, alignment);
  return SFPO_POOL_OK;
}

uint32_t Heap::place_in_hole(uint64_t size, uint64_t alignment, bool is_thorough) {
  // A hole is less than two pages: it ends in pages that are in use.
  uint64_t wanted = size + (alignment > unit_ ? alignment - unit_ : 0);
  if (wanted >= 2 * page_) return kNone;
  uint32_t hole = bins_.find(wanted, is_thorough);
  if (hole == kNone) return kNone;
  bins_.remove(hole);
  return carve(hole, size, alignment);
}

uint32_t Heap::carve(uint32_t hole, uint64_t size, uint64_t alignment) {
  uint64_t begin = round_up(tiles_[hole].offset, alignment);
  uint32_t block = hole;
  if (begin > tiles_[hole].offset) {
    block = tiles_.cut(hole, begin);
    bins_.insert(hole);
  }
  if (tiles_[block].size > size) bins_.insert(tiles_.cut(block, begin + size));
  tiles_[block].kind = Kind::live;
  in_use_ += size;
  ++blocks_;
  return block;
}

void Heap::release(uint32_t id) {
  in_use_ -= tiles_[id].size;
  --blocks_;
  tiles_[id].kind = Kind::hole;
  tiles_[id].owner = kNone;
  tiles_[id].requested = 0;
  for (uint32_t next : {tiles_[id].after, tiles_[id].before}) {
    if (next == kNone || tiles_[next].kind != Kind::hole) continue;
    bins_.remove(next);
    uint32_t first = next == tiles_[id].after ? id : next;
    tiles_.join_after(first);
    id = first;
  }
  // Whole pages inside it have nothing left.
  uint64_t first_page = round_up(tiles_[id].offset, page_) / page_;
  uint64_t end_page = tiles_[id].end() / page_;
  if (first_page >= end_page) {
    bins_.insert(id);
    return;
  }
  uint64_t begin = first_page * page_, end = end_page * page_;
  uint32_t before = tiles_[id].before, after = tiles_[id].after;
  uint64_t rest = tiles_[id].end() - end;
  // The run of pages is cut in two, each ending at the edge of a page.
  if (tiles_[id].offset < begin) {
    tiles_[id].size = begin - tiles_[id].offset;
    tiles_[id].after = kNone;
    bins_.insert(id);
  } else {
    if (before != kNone) tiles_[before].after = kNone;
    tiles_.drop(id);
  }
  if (rest > 0) {
    uint32_t second = tiles_.make(end, rest);
    tiles_.link(second, after);
    bins_.insert(second);
  } else if (after != kNone) {
    tiles_[after].before = kNone;
  }
  map_.release(static_cast<uint32_t>(first_page), static_cast<uint32_t>(end_page - first_page));
}

uint32_t Heap::first_in_page(uint32_t id, uint64_t page_begin) const {
  while (tiles_[id].offset > page_begin) id = tiles_[id].before;
  return id;
}

void Heap::withhold(uint32_t first, uint64_t page_begin, bool is_withheld) {
  for (uint32_t id = first; id != kNone && tiles_[id].offset < page_begin + page_;
       id = tiles_[id].after) {
    if (tiles_[id].kind != Kind::hole) continue;
    bins_.remove(id);
    if (!is_withheld) bins_.insert(id);
  }
}

uint64_t Heap::largest() const {
  uint64_t pages = (map_.limit() - map_.used()) * page_;
  uint32_t hole = bins_.largest();
  return std::max(pages, hole == kNone ? 0 : tiles_[hole].size);
}

}  // namespace sfpo::pool
