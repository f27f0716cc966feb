#include "memory_pool/pool.h"

#include <algorithm>
#include <cinttypes>

namespace sfpo::pool {
namespace {

bool is_power_of_two(uint64_t x) { return x != 0 && (x & (x - 1)) == 0; }

std::optional<uint8_t> poison_of(const sfpo_pool_options& options, uint8_t byte) {
  return options.poison ? std::optional<uint8_t>(byte) : std::nullopt;
}

}  // namespace

std::unique_ptr<Pool> Pool::make(std::unique_ptr<Pages> pages, const sfpo_pool_options& options,
                                 Code* code) {
  uint64_t page = options.page, unit = pages->alignment();
  *code = SFPO_POOL_OK;
  if (!is_power_of_two(page) || page < unit) {
    *code = fail(SFPO_POOL_INVALID,
                 "`page` must be a power of two of at least %" PRIu64 " bytes, got %" PRIu64, unit,
                 page);
  } else if (options.limit < page) {
    *code = fail(SFPO_POOL_INVALID, "`limit` must be at least a page, %s, got %s",
                 in_words(page).c_str(), in_words(options.limit).c_str());
  } else if (options.limit / page > (uint64_t{1} << 26)) {
    *code = fail(SFPO_POOL_INVALID, "`limit` must be at most 2^26 pages of %s, got %s",
                 in_words(page).c_str(), in_words(options.limit).c_str());
  }
  if (*code != SFPO_POOL_OK) return nullptr;
  std::unique_ptr<Pool> made(new Pool(std::move(pages), options));
  *code = made->heap_.reserve();
  return *code == SFPO_POOL_OK ? std::move(made) : nullptr;
}

Pool::Pool(std::unique_ptr<Pages> pages, const sfpo_pool_options& options)
    : options_(options),
      pages_(std::move(pages)),
      heap_(*pages_, options.page, static_cast<uint32_t>(options.limit / options.page),
            static_cast<uint32_t>(std::min(options.cache, options.limit) / options.page),
            poison_of(options, kPoison)),
      table_(pages_->alignment()) {}

Pool::~Pool() { heap_.map().trim(0); }

Code Pool::allocate(uint64_t size, uint64_t alignment, void** block) {
  Guard guard(lock_);
  if (kept_ != kNone && alignment == 0 && streams_.empty()) {
    Tile& tile = heap_.tiles()[kept_];
    if (size <= tile.size && size + heap_.unit() > tile.size) {
      *block = address(kept_);
      tile.kind = Kind::live;
      tile.requested = size;
      numbers_.requested += size;
      ++numbers_.allocations;
      kept_ = kNone;
      return SFPO_POOL_OK;
    }
  }
  settle();
  table_.prepare(1);
  uint32_t tile = kNone;
  if (Code code = give(size, alignment, &tile)) return code;
  table_.insert(heap_.tiles()[tile].offset, tile);
  *block = address(tile);
  return SFPO_POOL_OK;
}

Code Pool::give(uint64_t size, uint64_t alignment, uint32_t* tile) {
  uint64_t unit = heap_.unit(), page = heap_.page();
  if (alignment == 0) alignment = unit;
  if (!is_power_of_two(alignment) || alignment > page) {
    return fail(SFPO_POOL_INVALID,
                "`alignment` must be a power of two up to a page, %s, got %" PRIu64,
                in_words(page).c_str(), alignment);
  }
  if (size == 0) return fail(SFPO_POOL_INVALID, "`size` must be at least 1 byte, got 0");
  if (Code code = free_passed(false)) return code;
  if (size > options_.limit) {
    return fail(SFPO_POOL_OUT_OF_MEMORY, "a block of %s can never be had: the limit is %s",
                in_words(size).c_str(), in_words(options_.limit).c_str());
  }
  uint64_t rounded = (size + unit - 1) / unit * unit;
  if (Code code = place(rounded, std::max(alignment, unit), tile)) return code;
  heap_.tiles()[*tile].requested = size;
  if (Code code = look_at(*tile)) {
    heap_.release(*tile);
    return code;
  }
  numbers_.requested += size;
  ++numbers_.allocations;
  numbers_.peak_in_use = std::max(numbers_.peak_in_use, heap_.in_use());
  return SFPO_POOL_OK;
}

Code Pool::place(uint64_t size, uint64_t alignment, uint32_t* tile) {
  Code code = heap_.place(size, alignment, tile);
  if (code == SFPO_POOL_OUT_OF_MEMORY && movable_ > 0) {
    uint64_t given_back = 0;
    if (Code moved = compact_all(&given_back)) return moved;
    if (given_back > 0) code = heap_.place(size, alignment, tile);
  }
  if (code != SFPO_POOL_OUT_OF_MEMORY) return code;
  return fail(code,
              "no room for %s: %s of %s are in use, %s of it waiting for streams; the "
              "largest block that can be had is %s",
              in_words(size).c_str(), in_words(heap_.in_use()).c_str(),
              in_words(options_.limit).c_str(), in_words(numbers_.waiting).c_str(),
              in_words(heap_.largest()).c_str());
}

Code Pool::free(void* block) {
  Guard guard(lock_);
  uint32_t tile = kNone;
  if (Code code = find_block(block, &tile)) return code;
  settle();
  if (may_keep(heap_.tiles()[tile])) {
    numbers_.requested -= heap_.tiles()[tile].requested;
    heap_.tiles()[tile].kind = Kind::kept;
    kept_ = tile;
    ++frees_;
  } else {
    table_.erase(heap_.tiles()[tile].offset);
    if (Code code = retire(tile)) return code;
  }
  Code code = free_passed(false);
  compact_when_due();
  return code;
}

void Pool::settle() {
  if (kept_ == kNone) return;
  table_.erase(heap_.tiles()[kept_].offset);
  heap_.release(kept_);
  kept_ = kNone;
}

bool Pool::may_keep(const Tile& tile) const {
  return !options_.poison && tile.size <= options_.cache;
}

Code Pool::find_block(void* block, uint32_t* tile) {
  char* address = static_cast<char*>(block);
  uint64_t size = uint64_t{heap_.map().slots()} * heap_.page();
  uint64_t begin = reinterpret_cast<uint64_t>(pages_->base());
  uint64_t place = reinterpret_cast<uint64_t>(address) - begin;
  if (place >= size) {
    return fail(SFPO_POOL_FOREIGN, "%p is not an address of this pool, which has [%p, %p)", block,
                static_cast<void*>(pages_->base()), reinterpret_cast<void*>(begin + size));
  }
  *tile = table_.find(place);
  if (*tile == kNone) {
    return fail(SFPO_POOL_DOUBLE_FREE,
                "no block begins at %p: it was freed before, or this is an "
                "address inside of one",
                block);
  }
  if (heap_.tiles()[*tile].kind == Kind::kept) {
    return fail(SFPO_POOL_DOUBLE_FREE, "the block at %p was freed before", block);
  }
  if (heap_.tiles()[*tile].kind == Kind::waiting) {
    return fail(SFPO_POOL_DOUBLE_FREE, "the block at %p was freed before, on a stream", block);
  }
  return SFPO_POOL_OK;
}

Code Pool::retire(uint32_t tile) {
  const Tile& old = heap_.tiles()[tile];
  numbers_.requested -= old.requested;
  if (old.owner != kNone) --movable_;
  ++frees_;
  Code code = SFPO_POOL_OK;
  if (options_.poison) code = pages_->fill(old.offset, old.size, kPoison);
  heap_.release(tile);
  return code;
}

Code Pool::look_at(uint32_t tile) {
  if (!options_.poison) return SFPO_POOL_OK;
  const Tile& found = heap_.tiles()[tile];
  uint64_t place = found.size;
  if (Code code = pages_->find_other(found.offset, found.size, kPoison, &place)) return code;
  if (place == found.size) return SFPO_POOL_OK;
  ++numbers_.damaged;
  // Said once, and then mended: the next block from here is a good one.
  if (Code code = pages_->fill(found.offset, found.size, kPoison)) return code;
  return fail(SFPO_POOL_DAMAGED, "the byte at %p was written to after its block was freed",
              static_cast<void*>(pages_->base() + found.offset + place));
}

Code Pool::trim() {
  Guard guard(lock_);
  settle();
  Code code = free_passed(false);
  heap_.map().trim(0);
  return code;
}

Code Pool::check() {
  Guard guard(lock_);
  settle();
  if (Code code = free_passed(false)) return code;
  for (uint32_t id = 0; id < heap_.tiles().size(); ++id) {
    if (heap_.tiles()[id].kind != Kind::hole) continue;
    if (Code code = look_at(id)) return code;
  }
  for (const PageMap::Run& run : heap_.map().cached_runs()) {
    uint64_t size = run.count * heap_.page(), place = size;
    uint64_t offset = run.first * heap_.page();
    if (!options_.poison) break;
    if (Code code = pages_->find_other(offset, size, kPoison, &place)) return code;
    if (place == size) continue;
    ++numbers_.damaged;
    if (Code code = pages_->fill(offset, size, kPoison)) return code;
    return fail(SFPO_POOL_DAMAGED, "the byte at %p was written to after its block was freed",
                static_cast<void*>(pages_->base() + offset + place));
  }
  return SFPO_POOL_OK;
}

Code Pool::statistics(sfpo_pool_statistics* found) {
  Guard guard(lock_);
  settle();
  if (Code code = free_passed(false)) return code;
  const PageMap& map = heap_.map();
  uint64_t page = heap_.page();
  *found = numbers_;
  found->page = page;
  found->reserved = map.slots() * page;
  found->limit = map.limit() * page;
  found->mapped = (uint64_t{map.used()} + map.cached()) * page;
  found->cached = map.cached() * page;
  found->in_use = heap_.in_use();
  found->free = found->limit - found->in_use;
  found->largest_free = heap_.largest();
  found->peak_mapped = map.most_mapped() * page;
  found->blocks = heap_.blocks();
  found->pages_mapped = map.counts().mapped_ever;
  found->pages_given_back = map.counts().given_back;
  found->pages_moved = map.counts().moved;
  found->damaged += map.counts().damaged;
  return SFPO_POOL_OK;
}

Code Pool::may_end() {
  Guard guard(lock_);
  settle();
  if (Code code = free_passed(false)) return code;
  if (heap_.blocks() == 0) return SFPO_POOL_OK;
  return fail(SFPO_POOL_BUSY,
              "%" PRIu64
              " blocks of %s are still alive, %s of it waiting for "
              "streams: free them first",
              heap_.blocks(), in_words(heap_.in_use()).c_str(),
              in_words(numbers_.waiting).c_str());
}

}  // namespace sfpo::pool
