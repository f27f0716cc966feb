// Blocks that may move, and moving them: the emptiest pages first, into holes of other pages.
#include <algorithm>

#include "memory_pool/pool.h"

namespace sfpo::pool {

Code Pool::allocate_movable(uint64_t size, sfpo_pool_handle* handle) {
  Guard guard(lock_);
  settle();
  if (spare_handle_ == kNone) {
    handles_.emplace_back();
    spare_handle_ = static_cast<uint32_t>(handles_.size() - 1);
  }
  uint32_t tile = kNone;
  if (Code code = give(size, 0, &tile)) return code;
  uint32_t index = spare_handle_;
  spare_handle_ = handles_[index].next;
  handles_[index].tile = tile;
  handles_[index].pins = 0;
  heap_.tiles()[tile].owner = index;
  ++movable_;
  *handle = uint64_t{handles_[index].generation} << 32 | (uint64_t{index} + 1);
  return SFPO_POOL_OK;
}

Code Pool::find_handle(sfpo_pool_handle handle, uint32_t* index) {
  uint64_t place = (handle & UINT32_MAX) - 1;
  if (place >= handles_.size()) {
    return fail(SFPO_POOL_FOREIGN, "the handle %#llx is not of this pool",
                static_cast<unsigned long long>(handle));
  }
  *index = static_cast<uint32_t>(place);
  if (handles_[place].generation != handle >> 32 || handles_[place].tile == kNone) {
    return fail(SFPO_POOL_DOUBLE_FREE, "the block of the handle %#llx was freed before",
                static_cast<unsigned long long>(handle));
  }
  return SFPO_POOL_OK;
}

Code Pool::pin(sfpo_pool_handle handle, void** block) {
  Guard guard(lock_);
  uint32_t index = kNone;
  if (Code code = find_handle(handle, &index)) return code;
  ++handles_[index].pins;
  *block = address(handles_[index].tile);
  return SFPO_POOL_OK;
}

Code Pool::unpin(sfpo_pool_handle handle) {
  Guard guard(lock_);
  uint32_t index = kNone;
  if (Code code = find_handle(handle, &index)) return code;
  if (handles_[index].pins == 0) {
    return fail(SFPO_POOL_INVALID, "the block is not pinned: every unpin needs a pin before it");
  }
  --handles_[index].pins;
  return SFPO_POOL_OK;
}

Code Pool::free_movable(sfpo_pool_handle handle) {
  Guard guard(lock_);
  uint32_t index = kNone;
  if (Code code = find_handle(handle, &index)) return code;
  if (handles_[index].pins > 0) {
    return fail(SFPO_POOL_BUSY, "the block is pinned %u times: unpin it before it is freed",
                handles_[index].pins);
  }
  Code code = retire(handles_[index].tile);
  handles_[index].tile = kNone;
  ++handles_[index].generation;
  handles_[index].next = spare_handle_;
  spare_handle_ = index;
  compact_when_due();
  return code;
}

Code Pool::compact(uint64_t* given_back) {
  Guard guard(lock_);
  *given_back = 0;
  if (Code code = free_passed(false)) return code;
  return compact_all(given_back);
}

// The block of the caller is free whatever becomes of this; what fails to move stays.
void Pool::compact_when_due() {
  uint32_t every = static_cast<uint32_t>(std::max(options_.compact_every, 0));
  if (every == 0 || movable_ == 0 || frees_ % every != 0) return;
  uint64_t given_back = 0;
  compact_all(&given_back);
}

bool Pool::may_move(uint32_t tile) const {
  const Tile& found = heap_.tiles()[tile];
  return found.kind == Kind::live && found.owner != kNone && handles_[found.owner].pins == 0;
}

Code Pool::compact_all(uint64_t* given_back) {
  struct Page {
    uint64_t number;
    uint64_t used;    // bytes of blocks in it
    uint32_t tile;    // one of them
    bool is_movable;  // all of them
  };
  settle();
  ++numbers_.compactions;
  std::vector<Page> pages;
  for (uint32_t id = 0; id < heap_.tiles().size(); ++id) {
    const Tile& tile = heap_.tiles()[id];
    if (tile.kind != Kind::live && tile.kind != Kind::waiting) continue;
    uint64_t first = tile.offset / heap_.page(), last = (tile.end() - 1) / heap_.page();
    // Of a block of many pages those inside are full: only its ends share a page.
    for (uint64_t number : {first, last}) {
      uint64_t begin = std::max(tile.offset, number * heap_.page());
      uint64_t end = std::min(tile.end(), (number + 1) * heap_.page());
      pages.push_back({number, end - begin, id, may_move(id)});
      if (first == last) break;
    }
  }
  std::sort(pages.begin(), pages.end(),
            [](const Page& a, const Page& b) { return a.number < b.number; });
  size_t count = 0;
  for (const Page& page : pages) {
    if (count > 0 && pages[count - 1].number == page.number) {
      pages[count - 1].used += page.used;
      pages[count - 1].is_movable &= page.is_movable;
    } else {
      pages[count++] = page;
    }
  }
  pages.resize(count);
  std::sort(pages.begin(), pages.end(),
            [](const Page& a, const Page& b) { return a.used < b.used; });
  uint32_t before = heap_.map().used();
  Code code = SFPO_POOL_OK;
  for (const Page& page : pages) {
    uint64_t begin = page.number * heap_.page(), end = begin + heap_.page();
    const Tile& tile = heap_.tiles()[page.tile];
    // A block that lay in two pages may have left with the other one.
    bool is_there = tile.kind == Kind::live && tile.offset < end && tile.end() > begin;
    if (!page.is_movable || page.used == heap_.page() || !is_there) continue;
    if ((code = empty_page(page.tile, begin)) != SFPO_POOL_OK) break;
  }
  if (code == SFPO_POOL_OK) code = tighten();
  *given_back = (before - heap_.map().used()) * heap_.page();
  return code;
}

// Large blocks move to where they share their first page, as far as there are pages for copies.
Code Pool::tighten() {
  for (uint32_t id = 0; id < heap_.tiles().size(); ++id) {
    if (heap_.tiles()[id].size < heap_.page() || !may_move(id)) continue;
    uint32_t place = kNone;
    if (Code code = heap_.place_tighter(id, &place)) return code;
    if (place == kNone) continue;
    Code code = move_block(id, place);
    if (code != SFPO_POOL_OK) {
      heap_.release(place);
      return code;
    }
  }
  return SFPO_POOL_OK;
}

// All blocks of the page find holes elsewhere, or all stay.
Code Pool::empty_page(uint32_t tile, uint64_t page_begin) {
  uint32_t first = heap_.first_in_page(tile, page_begin);
  std::vector<uint32_t> blocks, places;
  for (uint32_t id = first; id != kNone; id = heap_.tiles()[id].after) {
    if (heap_.tiles()[id].offset >= page_begin + heap_.page()) break;
    if (heap_.tiles()[id].kind == Kind::live) blocks.push_back(id);
  }
  // The largest are the hardest to place.
  std::sort(blocks.begin(), blocks.end(),
            [&](uint32_t a, uint32_t b) { return heap_.tiles()[a].size > heap_.tiles()[b].size; });
  places.reserve(blocks.size());
  heap_.tiles().prepare(heap_.blocks() + blocks.size());
  heap_.withhold(first, page_begin, true);
  for (uint32_t id : blocks) {
    uint32_t place = heap_.place_in_hole(heap_.tiles()[id].size, heap_.unit());
    if (place == kNone) break;
    places.push_back(place);
  }
  if (places.size() < blocks.size()) {
    for (uint32_t place : places) heap_.release(place);
    heap_.withhold(first, page_begin, false);
    return SFPO_POOL_OK;
  }
  Code code = SFPO_POOL_OK;
  size_t moved = 0;
  for (; moved < blocks.size(); ++moved) {
    if ((code = move_block(blocks[moved], places[moved])) != SFPO_POOL_OK) break;
  }
  if (code != SFPO_POOL_OK) {
    // The first of what is left, where a part has gone, still leads to the page's holes.
    for (size_t i = moved; i < places.size(); ++i) heap_.release(places[i]);
    heap_.withhold(heap_.first_in_page(blocks[moved], page_begin), page_begin, false);
  }
  return code;
}

Code Pool::move_block(uint32_t from, uint32_t to) {
  Tile& old = heap_.tiles()[from];
  Tile& moved = heap_.tiles()[to];
  if (Code code = pages_->copy(old.offset, moved.offset, old.size)) return code;
  moved.requested = old.requested;
  moved.owner = old.owner;
  handles_[old.owner].tile = to;
  numbers_.moved += old.size;
  // From here on it has moved, whatever becomes of the place that it leaves.
  if (options_.poison) pages_->fill(old.offset, old.size, kPoison);
  heap_.release(from);
  return SFPO_POOL_OK;
}

}  // namespace sfpo::pool
