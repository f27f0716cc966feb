// Where a test's pages and streams come from.
#pragma once

#ifdef SFPO_POOL_HAS_CUDA
#include <dlfcn.h>

#include "memory_pool/cuda_pages.h"
#endif
#include "tests/pool_model.h"

namespace sfpo::pool {

// Pages of the host, or of an emulated GPU, whose memory the host can write to as well.
class Source {
 public:
  explicit Source(const char* driver) : driver_(driver) {
#ifdef SFPO_POOL_HAS_CUDA
    if (driver_ == nullptr) return;
    void* library = dlopen(driver_, RTLD_NOW);
    require(library != nullptr, "the driver cannot be loaded");
    submit_ = reinterpret_cast<void (*)(void*)>(dlsym(library, "emulated_submit"));
    complete_ = reinterpret_cast<void (*)(void*)>(dlsym(library, "emulated_complete"));
    in_use_ = reinterpret_cast<size_t (*)()>(dlsym(library, "emulated_in_use"));
#else
    require(driver_ == nullptr, "built without CUDA's headers");
#endif
  }

  bool is_gpu() const { return driver_ != nullptr; }
  std::unique_ptr<Pages> make() const {
    std::unique_ptr<Pages> pages = std::make_unique<HostPages>();
#ifdef SFPO_POOL_HAS_CUDA
    if (driver_) require(CudaPages::make(driver_, 0, &pages) == SFPO_POOL_OK, "no GPU");
#endif
    return pages;
  }
  Code submit(Pool& pool, void* stream) const {
    if (!is_gpu()) return pool.submit(stream);
    submit_(stream);
    return SFPO_POOL_OK;
  }
  Code complete(Pool& pool, void* stream) const {
    if (!is_gpu()) return pool.complete(stream);
    complete_(stream);
    return SFPO_POOL_OK;
  }
  // What the GPU has given, once every pool has ended.
  size_t in_use() const { return is_gpu() ? in_use_() : 0; }

 private:
  const char* driver_;
  void (*submit_)(void*) = nullptr;
  void (*complete_)(void*) = nullptr;
  size_t (*in_use_)() = nullptr;
};

}  // namespace sfpo::pool
