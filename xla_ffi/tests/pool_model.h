// What a pool must do, said once more and simply: blocks with patterns in them, random calls,
// and pages that sometimes refuse.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "memory_pool/host_pages.h"
#include "memory_pool/pool.h"
#include "tests/random.h"

namespace sfpo::pool {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "pool: %s (last message: %s)\n", what, last_message().c_str());
  std::abort();
}

// Every so many calls fail, as where the system has no memory.
class FlakyPages final : public Pages {
 public:
  FlakyPages(std::unique_ptr<Pages> pages, uint64_t seed)
      : pages_(std::move(pages)), random_(seed) {}
  void refuse_one_of(int64_t calls) { one_of_ = calls; }

  Code reserve(uint32_t slots, uint64_t page) override { return pages_->reserve(slots, page); }
  char* base() const override { return pages_->base(); }
  uint64_t alignment() const override { return pages_->alignment(); }
  Code map(uint32_t first, uint32_t count) override {
    return refuses() ? refused() : pages_->map(first, count);
  }
  Code unmap(uint32_t first, uint32_t count) override {
    return refuses() ? refused() : pages_->unmap(first, count);
  }
  Code move(uint32_t from, uint32_t to) override {
    return refuses() ? refused() : pages_->move(from, to);
  }
  Code copy(uint64_t from, uint64_t to, uint64_t size) override {
    return refuses() ? refused() : pages_->copy(from, to, size);
  }
  Code fill(uint64_t offset, uint64_t size, uint8_t byte) override {
    return pages_->fill(offset, size, byte);
  }
  Code find_other(uint64_t offset, uint64_t size, uint8_t byte, uint64_t* found) override {
    return pages_->find_other(offset, size, byte, found);
  }
  Code record(void* stream, uint64_t* ticket) override {
    return refuses() ? refused() : pages_->record(stream, ticket);
  }
  Code passed(uint64_t ticket, bool* is_passed) override {
    return pages_->passed(ticket, is_passed);
  }
  Code wait(uint64_t ticket) override { return pages_->wait(ticket); }
  Code submit(void* stream) override { return pages_->submit(stream); }
  Code complete(void* stream) override { return pages_->complete(stream); }

 private:
  bool refuses() { return one_of_ > 0 && random_.integer(1, one_of_) == 1; }
  Code refused() { return fail(SFPO_POOL_SYSTEM, "refused by the test"); }

  std::unique_ptr<Pages> pages_;
  Random random_;
  int64_t one_of_ = 0;
};

// A block, and the bytes that the test has written into it.
struct Block {
  char* address;            // of one that stays
  sfpo_pool_handle handle;  // of one that may move; else 0
  uint64_t size;
  uint64_t seed;
  int pins;
};

// At its ends and once a page: all bytes of a small block.
template <typename Visit>
void each_mark(uint64_t size, Visit visit) {
  uint64_t edge = std::min<uint64_t>(size, 128);
  for (uint64_t i = 0; i < edge; ++i) visit(i);
  for (uint64_t i = edge; i < size; i += 1021) visit(i);
  for (uint64_t i = size - edge; i < size; ++i) visit(i);
}

inline char mark_of(uint64_t seed, uint64_t i) {
  return static_cast<char>((seed * 0x9E3779B97F4A7C15u + i * 0xBF58476D1CE4E5B9u) >> 56);
}

inline void write_marks(char* at, const Block& block) {
  each_mark(block.size, [&](uint64_t i) { at[i] = mark_of(block.seed, i); });
}

inline void check_marks(const char* at, const Block& block) {
  each_mark(block.size, [&](uint64_t i) {
    require(at[i] == mark_of(block.seed, i), "a block does not hold what was written");
  });
}

}  // namespace sfpo::pool
