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
  *id = place_in_hole(size, alignment);
  if (*id != kNone) return SFPO_POOL_OK;
  uint64_t count = (size + page_ - 1) / page_;
  uint32_t first = 0;
  if (Code code = place_at_end(size, alignment, kLooks, id)) return code;
  if (*id != kNone) return SFPO_POOL_OK;
  Code code = count > map_.limit() ? SFPO_POOL_OUT_OF_MEMORY
                                   : map_.acquire(static_cast<uint32_t>(count), &first);
  if (code == SFPO_POOL_OUT_OF_MEMORY) {
    // What a quick look has missed.
    *id = place_in_hole(size, alignment, kAll);
    uint32_t growing = *id == kNone && alignment == unit_ ? largest_growing() : kNone;
    uint64_t pages = uint64_t{map_.limit() - map_.used()} * page_;
    if (growing != kNone && size <= tiles_[growing].size + pages) return grow(growing, size, id);
  }
  if (*id != kNone) return SFPO_POOL_OK;
  if (code != SFPO_POOL_OK) return code;
  *id = carve(tiles_.make(first * page_, count * page_), size, alignment);
  return SFPO_POOL_OK;
}

uint32_t Heap::place_in_hole(uint64_t size, uint64_t alignment, uint32_t looks) {
  // A hole is less than two pages: it ends in pages that are in use.
  uint64_t wanted = size + (alignment > unit_ ? alignment - unit_ : 0);
  if (wanted >= 2 * page_) return kNone;
  // The end of a run is kept for a large block as long as there is another place.
  auto any = [](uint32_t) { return true; };
  uint32_t hole = inner_.find(wanted, looks, any);
  if (hole == kNone) hole = last_.find(wanted, looks, any);
  if (hole == kNone) return kNone;
  remove(hole);
  return carve(hole, size, alignment);
}

Code Heap::place_at_end(uint64_t size, uint64_t alignment, uint32_t looks, uint32_t* id) {
  uint64_t over = size % page_;
  if (size < page_ || over == 0 || alignment > unit_) return SFPO_POOL_OK;
  uint32_t count = static_cast<uint32_t>(size / page_);
  if (count > map_.limit() - map_.used()) return SFPO_POOL_OK;
  uint32_t hole = last_.find(over, looks, [&](uint32_t one) {
    return map_.is_free(static_cast<uint32_t>(tiles_[one].end() / page_), count);
  });
  return hole == kNone ? SFPO_POOL_OK : grow(hole, size, id);
}

Code Heap::grow(uint32_t hole, uint64_t size, uint32_t* id) {
  uint64_t count = (size - tiles_[hole].size + page_ - 1) / page_;
  uint32_t next = static_cast<uint32_t>(tiles_[hole].end() / page_);
  if (Code code = map_.acquire_at(next, static_cast<uint32_t>(count))) return code;
  remove(hole);
  tiles_[hole].size += count * page_;
  *id = carve(hole, size, unit_);
  return SFPO_POOL_OK;
}

Code Heap::place_tighter(uint32_t id, uint32_t* place) {
  *place = kNone;
  uint64_t size = tiles_[id].size;
  // Where it lies at the end of a run, the hole behind it is no place for it.
  uint32_t behind = tiles_[id].after;
  bool is_end = behind != kNone && tiles_[behind].kind == Kind::hole && tiles_[behind].is_last;
  if (is_end) remove(behind);
  uint64_t over = size % page_;
  bool is_tighter = over > 0 && own_pages(id) > size / page_;
  tiles_.prepare(blocks_ + 1);
  Code code = is_tighter ? place_at_end(size, unit_, kAll, place) : SFPO_POOL_OK;
  if (is_end) insert(behind);
  return code;
}

// Pages that nothing else lies in.
uint64_t Heap::own_pages(uint32_t id) const {
  const Tile& tile = tiles_[id];
  uint64_t begin = tile.offset, end = tile.end();
  // Holes beside it go with it; what lies behind them begins or ends at their other edge.
  if (tile.before == kNone) {
    begin = begin / page_ * page_;
  } else if (tiles_[tile.before].kind == Kind::hole) {
    begin = tiles_[tile.before].offset;
  }
  if (tile.after == kNone) {
    end = round_up(end, page_);
  } else if (tiles_[tile.after].kind == Kind::hole) {
    end = tiles_[tile.after].end();
  }
  uint64_t first = round_up(begin, page_);
  return end > first ? end / page_ - first / page_ : 0;
}

void Heap::insert(uint32_t hole) {
  tiles_[hole].is_last = tiles_[hole].after == kNone;
  (tiles_[hole].is_last ? last_ : inner_).insert(hole);
}

void Heap::remove(uint32_t hole) { (tiles_[hole].is_last ? last_ : inner_).remove(hole); }

uint32_t Heap::carve(uint32_t hole, uint64_t size, uint64_t alignment) {
  uint64_t begin = round_up(tiles_[hole].offset, alignment);
  uint32_t block = hole;
  if (begin > tiles_[hole].offset) {
    block = tiles_.cut(hole, begin);
    insert(hole);
  }
  if (tiles_[block].size > size) insert(tiles_.cut(block, begin + size));
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
    remove(next);
    uint32_t first = next == tiles_[id].after ? id : next;
    tiles_.join_after(first);
    id = first;
  }
  // Whole pages inside it have nothing left.
  uint64_t first_page = round_up(tiles_[id].offset, page_) / page_;
  uint64_t end_page = tiles_[id].end() / page_;
  if (first_page >= end_page) {
    insert(id);
    return;
  }
  uint64_t begin = first_page * page_, end = end_page * page_;
  uint32_t before = tiles_[id].before, after = tiles_[id].after;
  uint64_t rest = tiles_[id].end() - end;
  // The run of pages is cut in two, each ending at the edge of a page.
  if (tiles_[id].offset < begin) {
    tiles_[id].size = begin - tiles_[id].offset;
    tiles_[id].after = kNone;
    insert(id);
  } else {
    if (before != kNone) tiles_[before].after = kNone;
    tiles_.drop(id);
  }
  if (rest > 0) {
    uint32_t second = tiles_.make(end, rest);
    tiles_.link(second, after);
    insert(second);
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
    remove(id);
    if (!is_withheld) insert(id);
  }
}

uint32_t Heap::largest_growing() const {
  uint32_t best = kNone, count = map_.limit() - map_.used();
  for (uint32_t id = 0; id < tiles_.size(); ++id) {
    const Tile& tile = tiles_[id];
    if (tile.kind != Kind::hole || !tile.is_last) continue;
    if (best != kNone && tile.size <= tiles_[best].size) continue;
    if (map_.is_free(static_cast<uint32_t>(tile.end() / page_), count)) best = id;
  }
  return best;
}

uint64_t Heap::largest() const {
  uint64_t most = uint64_t{map_.limit() - map_.used()} * page_;
  uint32_t growing = largest_growing();
  if (growing != kNone) most += tiles_[growing].size;
  for (const Bins* bins : {&inner_, &last_}) {
    uint32_t hole = bins->largest();
    if (hole != kNone) most = std::max(most, tiles_[hole].size);
  }
  return most;
}

}  // namespace sfpo::pool
