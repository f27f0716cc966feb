// Where the pool's pages come from: the only part that differs between host and GPU.
#pragma once

#include <cstdint>

#include "memory_pool/status.h"

namespace sfpo::pool {

// A range of addresses cut into slots of one page. A slot is empty, or has a page in it. The
// pool calls all of this under its lock, and only with slots in the range.
class Pages {
 public:
  virtual ~Pages() = default;

  // Reserves the addresses, without memory. Called once, before all else.
  virtual Code reserve(uint32_t slots, uint64_t page) = 0;
  virtual char* base() const = 0;
  // Of a block that asks for none.
  virtual uint64_t alignment() const = 0;

  // Puts new pages into empty slots: all of them, or none where it fails.
  virtual Code map(uint32_t first, uint32_t count) = 0;
  // Empties slots, and gives their pages back at once. A page whose slot could not be emptied
  // stays in it and may be used again.
  virtual Code unmap(uint32_t first, uint32_t count) = 0;
  // Takes a page that nobody uses to an empty slot. Its contents may be lost.
  virtual Code move(uint32_t from, uint32_t to) = 0;

  // What lies in pages. Offsets are from the base; ranges do not overlap.
  virtual Code copy(uint64_t from, uint64_t to, uint64_t size) = 0;
  virtual Code fill(uint64_t offset, uint64_t size, uint8_t byte) = 0;
  // The first byte in the range that is another one; `size` where there is none.
  virtual Code find_other(uint64_t offset, uint64_t size, uint8_t byte, uint64_t* found) = 0;

  // The streams' clock. A ticket passes when all that the stream was given before it has run;
  // `passed` and `wait` give back a ticket that has.
  virtual Code record(void* stream, uint64_t* ticket) = 0;
  virtual Code passed(uint64_t ticket, bool* is_passed) = 0;
  virtual Code wait(uint64_t ticket) = 0;
  // Streams that are only numbers: work begins, work ends.
  virtual Code submit(void* stream) = 0;
  virtual Code complete(void* stream) = 0;
};

}  // namespace sfpo::pool
