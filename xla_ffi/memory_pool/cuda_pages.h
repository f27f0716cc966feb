// Pages of a GPU's memory, by the driver's virtual memory management.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "memory_pool/cuda_driver.h"
#include "memory_pool/pages.h"

namespace sfpo::pool {

// Nothing here waits for kernels: a block is to be freed when its last one has run, or on its
// stream.
class CudaPages final : public Pages {
 public:
  // UNAVAILABLE where there is no driver, no such GPU, or none that can map pages.
  static Code make(const char* driver, int device, std::unique_ptr<Pages>* pages);

  ~CudaPages() override;
  Code reserve(uint32_t slots, uint64_t page) override;
  char* base() const override { return reinterpret_cast<char*>(base_); }
  uint64_t alignment() const override { return 256; }
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
  // The GPU's context on this thread, as long as it lives.
  class Current {
   public:
    explicit Current(const CudaPages& pages);
    ~Current();
    Code code;

   private:
    const CudaDriver& driver_;
  };

  CudaPages(const CudaDriver& driver, int device) : driver_(driver), device_(device) {}
  CUdeviceptr at(uint32_t slot) const { return base_ + slot * page_; }
  CUmemAllocationProp properties() const;
  Code allow(uint32_t first, uint32_t count);
  Code map_one(uint32_t slot);
  Code unmap_one(uint32_t slot);
  void keep_event(uint64_t ticket);

  CudaDriver driver_;
  int device_;
  CUcontext context_ = nullptr;
  CUdeviceptr base_ = 0;
  uint64_t page_ = 0;
  uint64_t size_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;  // the page in each slot; 0: empty
  std::unordered_map<uint64_t, CUevent> tickets_;
  std::vector<CUevent> events_;  // to be used again
  uint64_t last_ticket_ = 0;
};

}  // namespace sfpo::pool
