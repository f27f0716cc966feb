// Which slots have a page, which pages are in use, and how many there may be.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "memory_pool/pages.h"

namespace sfpo::pool {

inline constexpr uint32_t kNone = UINT32_MAX;

// Gives out runs of pages side by side. As many as are free can always be had in one run, for a
// run is made of addresses, and free pages lying elsewhere are moved there.
class PageMap {
 public:
  struct Run {
    uint32_t first;
    uint32_t count;
  };
  struct Counts {
    uint64_t mapped_ever = 0;
    uint64_t given_back = 0;
    uint64_t moved = 0;
    uint64_t damaged = 0;  // pages that were no longer all poison as they were lost
  };

  // `limit` and `cache` are in pages. With `poison` all bytes of free pages are that one, and
  // are looked at before they would be lost.
  PageMap(Pages& pages, uint32_t limit, uint32_t cache, std::optional<uint8_t> poison)
      : pages_(pages), limit_(limit), cache_limit_(cache), poison_(poison) {}

  // Addresses for so many pages that a run is found however they are taken and released.
  static uint32_t slots_for(uint32_t limit);
  Code reserve(uint64_t page);

  // A run of `count` pages, its first slot in `first`. OUT_OF_MEMORY, without a message, above
  // the limit.
  Code acquire(uint32_t count, uint32_t* first);
  // The same in these very slots; false where one of them is in use, or is none.
  bool is_free(uint32_t first, uint32_t count) const;
  Code acquire_at(uint32_t first, uint32_t count);
  // With `poison`, they are to be filled already.
  void release(uint32_t first, uint32_t count);
  // Gives cached pages back until at most `keep` are left.
  void trim(uint32_t keep);

  uint32_t slots() const { return slots_; }
  uint32_t limit() const { return limit_; }
  uint32_t used() const { return used_; }
  uint32_t cached() const { return cached_; }
  uint32_t most_mapped() const { return most_mapped_; }
  const Counts& counts() const { return counts_; }
  const std::vector<Run>& cached_runs() const { return runs_; }

 private:
  // Slots left free before a run, so that the one in front of it can grow.
  static constexpr uint32_t kGap = 32;

  // The cached run that `count` pages fit into best, or nothing.
  bool take_cached(uint32_t count, uint32_t* first);
  // The lowest run of slots that are not in use, after `gap` others that are not; kNone.
  uint32_t find_slots(uint32_t count, uint32_t gap) const;
  Code take(uint32_t first, uint32_t count);
  // Puts pages into the slots of a run that have none.
  Code complete(uint32_t first, uint32_t count);
  Code fill_gap(uint32_t first, uint32_t end, uint32_t* filled);
  Code poison(uint32_t first, uint32_t count);
  void look_at(uint32_t first, uint32_t count);
  void mark(uint32_t first, uint32_t count, bool is_used);
  void add_cached(uint32_t first, uint32_t count);
  // Takes what of the cached runs lies in the range out of them, into `kept_`.
  void cut_cached(uint32_t first, uint32_t count);

  Pages& pages_;
  uint32_t limit_;
  uint32_t cache_limit_;
  std::optional<uint8_t> poison_;
  uint64_t page_ = 0;
  uint32_t slots_ = 0;
  uint32_t used_ = 0;
  uint32_t cached_ = 0;
  uint32_t most_mapped_ = 0;
  Counts counts_;
  std::vector<uint64_t> is_used_;  // a bit a slot
  std::vector<Run> runs_;          // cached, by address, none touching the next
  std::vector<Run> kept_, outside_;
};

}  // namespace sfpo::pool
