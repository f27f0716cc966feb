// Pages of ordinary memory.
#pragma once

#include <unordered_map>

#include "memory_pool/pages.h"

namespace sfpo::pool {

// Anonymous memory in a reserved range, as huge pages of the kernel where it allows them. A
// page in a slot is the right to it: the kernel finds memory for it at the first touch.
class HostPages final : public Pages {
 public:
  ~HostPages() override;
  Code reserve(uint32_t slots, uint64_t page) override;
  char* base() const override { return base_; }
  uint64_t alignment() const override { return 64; }
  Code map(uint32_t first, uint32_t count) override;
  Code unmap(uint32_t first, uint32_t count) override;
  Code move(uint32_t from, uint32_t to) override;
  Code copy(uint64_t from, uint64_t to, uint64_t size) override;
  Code fill(uint64_t offset, uint64_t size, uint8_t byte) override;
  Code find_other(uint64_t offset, uint64_t size, uint8_t byte, uint64_t* found) override;
  Code record(void* stream, uint64_t* ticket) override;
  Code passed(uint64_t ticket, bool* is_passed) override;
  Code wait(uint64_t ticket) override;
  Code submit(void* stream) override;
  Code complete(void* stream) override;

 private:
  struct Stream {
    uint64_t submitted = 0;
    uint64_t completed = 0;
  };
  struct Ticket {
    void* stream;
    uint64_t submitted;
  };

  char* at(uint32_t slot) const { return base_ + slot * page_; }

  void* range_ = nullptr;
  uint64_t range_size_ = 0;
  char* base_ = nullptr;
  uint64_t page_ = 0;
  std::unordered_map<void*, Stream> streams_;
  std::unordered_map<uint64_t, Ticket> tickets_;
  uint64_t last_ticket_ = 0;
};

}  // namespace sfpo::pool
