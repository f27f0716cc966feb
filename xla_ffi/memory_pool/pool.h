// The pool: blocks by address and by handle, frees in the order of streams, poison, numbers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "memory_pool/address_table.h"
#include "memory_pool/heap.h"
#include "memory_pool/lock.h"
#include "memory_pool/pages.h"

namespace sfpo::pool {

class Pool {
 public:
  // Checks the options and reserves the addresses; null, with the code, where it cannot.
  static std::unique_ptr<Pool> make(std::unique_ptr<Pages> pages, const sfpo_pool_options& options,
                                    Code* code);
  ~Pool();

  Code allocate(uint64_t size, uint64_t alignment, void** block);
  Code free(void* block);
  Code free_on_stream(void* block, void* stream);
  Code collect();
  Code wait();
  Code submit(void* stream);
  Code complete(void* stream);

  Code allocate_movable(uint64_t size, sfpo_pool_handle* handle);
  Code pin(sfpo_pool_handle handle, void** block);
  Code unpin(sfpo_pool_handle handle);
  Code free_movable(sfpo_pool_handle handle);

  Code compact(uint64_t* given_back);
  Code trim();
  Code check();
  Code statistics(sfpo_pool_statistics* found);
  // OK where no block is alive.
  Code may_end();

 private:
  using Guard = std::lock_guard<Lock>;
  static constexpr uint8_t kPoison = 0xDB;

  struct Handle {
    uint32_t tile = kNone;  // kNone: nobody's
    uint32_t generation = 1;
    uint32_t pins = 0;
    uint32_t next = kNone;  // of nobody's
  };
  struct Waiting {
    uint32_t tile;
    uint64_t ticket;
  };
  struct Stream {
    void* stream;
    std::deque<Waiting> frees;
  };

  Pool(std::unique_ptr<Pages> pages, const sfpo_pool_options& options);

  // All below are called under the lock.
  // Really frees the block that was freed last.
  void settle();
  bool may_keep(const Tile& tile) const;
  Code give(uint64_t size, uint64_t alignment, uint32_t* tile);
  Code place(uint64_t size, uint64_t alignment, uint32_t* tile);
  Code find_block(void* block, uint32_t* tile);
  Code find_handle(sfpo_pool_handle handle, uint32_t* index);
  // Fills a block that nobody may use any more, and makes a hole of it.
  Code retire(uint32_t tile);
  Code look_at(uint32_t tile);
  Code free_passed(bool is_waiting);
  // compaction.cc
  Code compact_all(uint64_t* given_back);
  bool may_move(uint32_t tile) const;
  Code empty_page(uint32_t tile, uint64_t page_begin);
  void compact_when_due();
  Code tighten();
  Code move_block(uint32_t from, uint32_t to);

  char* address(uint32_t tile) const { return pages_->base() + heap_.tiles()[tile].offset; }

  sfpo_pool_options options_;
  std::unique_ptr<Pages> pages_;
  Lock lock_;
  Heap heap_;
  AddressTable table_;  // blocks by address; those with handles are not in it
  std::vector<Handle> handles_;
  uint32_t spare_handle_ = kNone;
  std::vector<Stream> streams_;
  // A caller that frees a block often asks for one of the same size next, and gets it at the
  // price of malloc. Every other call settles it first: nobody sees it.
  uint32_t kept_ = kNone;
  uint64_t movable_ = 0;
  uint64_t frees_ = 0;
  sfpo_pool_statistics numbers_{};
};

}  // namespace sfpo::pool
