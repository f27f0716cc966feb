#include "memory_pool/page_map.h"

#include <algorithm>

namespace sfpo::pool {
namespace {

// visit(word, the bits of these slots in it), until one returns false.
template <typename Visit>
bool each_word(uint32_t first, uint32_t count, Visit visit) {
  for (uint32_t slot = first, end = first + count; slot < end;) {
    uint32_t bit = slot % 64, bits = std::min(64 - bit, end - slot);
    uint64_t mask = (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1) << bit;
    if (!visit(slot / 64, mask)) return false;
    slot += bits;
  }
  return true;
}

}  // namespace

uint32_t PageMap::slots_for(uint32_t limit) {
  // First fit, with L pages at most in runs of up to L, needs about L log2 L addresses in the
  // worst case (J. M. Robson, Worst case fragmentation of first fit and best fit storage
  // allocation strategies, The Computer Journal 20, 1977).
  // Twice that leaves gaps for runs to grow into.
  uint64_t factor = 2;
  for (uint32_t left = limit; left > 1; left /= 2) ++factor;
  return static_cast<uint32_t>(std::min<uint64_t>(2 * factor * limit, kNone - 1));
}

Code PageMap::reserve(uint64_t page) {
  page_ = page;
  slots_ = slots_for(limit_);
  is_used_.assign((uint64_t{slots_} + 63) / 64, 0);
  // As many as there can be, so that nothing later fails half way for want of memory.
  for (auto* runs : {&runs_, &kept_, &outside_}) runs->reserve(uint64_t{limit_} + 2);
  return pages_.reserve(slots_, page);
}

Code PageMap::acquire(uint32_t count, uint32_t* first) {
  if (count > limit_ - used_) return SFPO_POOL_OUT_OF_MEMORY;
  if (take_cached(count, first)) {
    mark(*first, count, true);
    used_ += count;
    return SFPO_POOL_OK;
  }
  *first = find_slots(count, kGap);
  if (*first == kNone) *first = find_slots(count, 0);
  if (*first == kNone) {
    return fail(SFPO_POOL_SYSTEM, "no %u pages of addresses side by side are left", count);
  }
  return take(*first, count);
}

bool PageMap::is_free(uint32_t first, uint32_t count) const {
  if (first >= slots_ || count > slots_ - first) return false;
  return each_word(first, count,
                   [this](uint32_t word, uint64_t mask) { return (is_used_[word] & mask) == 0; });
}

Code PageMap::acquire_at(uint32_t first, uint32_t count) {
  return count > limit_ - used_ ? SFPO_POOL_OUT_OF_MEMORY : take(first, count);
}

Code PageMap::take(uint32_t first, uint32_t count) {
  if (Code code = complete(first, count)) return code;
  mark(first, count, true);
  used_ += count;
  most_mapped_ = std::max(most_mapped_, used_ + cached_);
  return SFPO_POOL_OK;
}

void PageMap::release(uint32_t first, uint32_t count) {
  mark(first, count, false);
  used_ -= count;
  add_cached(first, count);
  if (cached_ > cache_limit_) trim(cache_limit_);
}

void PageMap::trim(uint32_t keep) {
  // The highest addresses first, so that what is kept lies low and together.
  for (size_t i = runs_.size(); i-- > 0 && cached_ > keep;) {
    uint32_t count = std::min(runs_[i].count, cached_ - keep);
    uint32_t first = runs_[i].first + runs_[i].count - count;
    look_at(first, count);
    // Pages that cannot be given back stay in the cache, and are counted there.
    if (pages_.unmap(first, count) != SFPO_POOL_OK) continue;
    counts_.given_back += count;
    cached_ -= count;
    runs_[i].count -= count;
    if (runs_[i].count == 0) runs_.erase(runs_.begin() + static_cast<int64_t>(i));
  }
}

bool PageMap::take_cached(uint32_t count, uint32_t* first) {
  size_t best = runs_.size();
  for (size_t i = 0; i < runs_.size(); ++i) {
    if (runs_[i].count < count) continue;
    if (best == runs_.size() || runs_[i].count < runs_[best].count) best = i;
    if (runs_[best].count == count) break;
  }
  if (best == runs_.size()) return false;
  *first = runs_[best].first;
  runs_[best].first += count;
  runs_[best].count -= count;
  if (runs_[best].count == 0) runs_.erase(runs_.begin() + static_cast<int64_t>(best));
  cached_ -= count;
  return true;
}

uint32_t PageMap::find_slots(uint32_t count, uint32_t gap) const {
  // Nothing lies before the first slot.
  uint32_t length = gap;
  for (uint32_t slot = 0; slot < slots_;) {
    uint64_t word = is_used_[slot / 64] >> (slot % 64);
    uint32_t left = std::min(64 - slot % 64, slots_ - slot);
    if (word & 1) {
      // Zeros that were shifted in are none; a word of ones has none at all.
      uint32_t ones = ~word == 0 ? left : std::min<uint32_t>(__builtin_ctzll(~word), left);
      slot += ones;
      length = 0;
    } else {
      uint32_t zeros = word == 0 ? left : std::min<uint32_t>(__builtin_ctzll(word), left);
      slot += zeros;
      length += zeros;
      if (length >= count + gap) return slot - length + gap;
    }
  }
  return kNone;
}

Code PageMap::complete(uint32_t first, uint32_t count) {
  // What is cached in the run stays where it is, and the gaps between are filled.
  cut_cached(first, count);
  Code code = SFPO_POOL_OK;
  uint32_t slot = first;
  size_t next = 0;
  while (slot < first + count && code == SFPO_POOL_OK) {
    if (next < kept_.size() && kept_[next].first == slot) {
      slot += kept_[next++].count;
      continue;
    }
    uint32_t filled = 0, end = next < kept_.size() ? kept_[next].first : first + count;
    code = fill_gap(slot, end, &filled);
    slot += filled;
  }
  if (code == SFPO_POOL_OK) return code;
  // Half a run is none: its pages are free ones.
  std::string why = last_message();
  if (slot > first) add_cached(first, slot - first);
  for (; next < kept_.size(); ++next) add_cached(kept_[next].first, kept_[next].count);
  trim(cache_limit_);
  last_message() = why;
  return code;
}

Code PageMap::fill_gap(uint32_t first, uint32_t end, uint32_t* filled) {
  // Free pages from elsewhere, the highest first: they are cheaper than new ones.
  for (; first + *filled < end && !runs_.empty(); ++*filled) {
    uint32_t slot = first + *filled, from = runs_.back().first + runs_.back().count - 1;
    look_at(from, 1);
    if (Code code = pages_.move(from, slot)) return code;
    if (--runs_.back().count == 0) runs_.pop_back();
    --cached_;
    ++counts_.moved;
    if (Code code = poison(slot, 1)) return code;
  }
  uint32_t slot = first + *filled, left = end - slot;
  if (left == 0) return SFPO_POOL_OK;
  if (Code code = pages_.map(slot, left)) return code;
  counts_.mapped_ever += left;
  Code code = poison(slot, left);
  if (code == SFPO_POOL_OK) *filled += left;
  return code;
}

// Pages that cannot be filled go back.
Code PageMap::poison(uint32_t first, uint32_t count) {
  if (!poison_) return SFPO_POOL_OK;
  Code code = pages_.fill(first * page_, count * page_, *poison_);
  if (code != SFPO_POOL_OK && pages_.unmap(first, count) == SFPO_POOL_OK) {
    counts_.given_back += count;
  }
  return code;
}

void PageMap::look_at(uint32_t first, uint32_t count) {
  for (uint32_t slot = first; poison_ && slot < first + count; ++slot) {
    uint64_t found = page_;
    Code code = pages_.find_other(slot * page_, page_, *poison_, &found);
    if (code == SFPO_POOL_OK && found < page_) ++counts_.damaged;
  }
}

void PageMap::mark(uint32_t first, uint32_t count, bool is_used) {
  each_word(first, count, [&](uint32_t word, uint64_t mask) {
    is_used_[word] = is_used ? is_used_[word] | mask : is_used_[word] & ~mask;
    return true;
  });
}

void PageMap::add_cached(uint32_t first, uint32_t count) {
  cached_ += count;
  auto next = std::lower_bound(runs_.begin(), runs_.end(), first,
                               [](const Run& run, uint32_t slot) { return run.first < slot; });
  bool joins_next = next != runs_.end() && next->first == first + count;
  if (next != runs_.begin()) {
    Run& before = *(next - 1);
    if (before.first + before.count == first) {
      before.count += count;
      if (joins_next) {
        before.count += next->count;
        runs_.erase(next);
      }
      return;
    }
  }
  if (joins_next) {
    next->first = first;
    next->count += count;
  } else {
    runs_.insert(next, {first, count});
  }
}

void PageMap::cut_cached(uint32_t first, uint32_t count) {
  kept_.clear();
  outside_.clear();
  uint32_t end = first + count;
  for (const Run& run : runs_) {
    uint32_t run_end = run.first + run.count;
    uint32_t low = std::max(run.first, first), high = std::min(run_end, end);
    if (low >= high) {
      outside_.push_back(run);
      continue;
    }
    if (run.first < low) outside_.push_back({run.first, low - run.first});
    kept_.push_back({low, high - low});
    if (high < run_end) outside_.push_back({high, run_end - high});
    cached_ -= high - low;
  }
  runs_.swap(outside_);
}

}  // namespace sfpo::pool
