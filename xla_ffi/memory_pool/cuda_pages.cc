#include "memory_pool/cuda_pages.h"

#include <algorithm>

namespace sfpo::pool {

Code CudaPages::make(const char* file, int device, std::unique_ptr<Pages>* pages) {
  CudaDriver driver;
  if (Code code = driver.load(file)) return code;
  CUdevice found;
  int can_map = 0;
  Code code = driver.check(driver.cuInit(0), "start");
  if (code == SFPO_POOL_OK) {
    code = driver.check(driver.cuDeviceGet(&found, device), "find the GPU of that number");
  }
  if (code == SFPO_POOL_OK) {
    CUdevice_attribute wanted = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    code = driver.check(driver.cuDeviceGetAttribute(&can_map, wanted, found), "ask the GPU");
  }
  if (code != SFPO_POOL_OK) return SFPO_POOL_UNAVAILABLE;
  if (can_map == 0) {
    return fail(SFPO_POOL_UNAVAILABLE, "the GPU %d cannot map memory page by page", device);
  }
  pages->reset(new CudaPages(driver, found));
  return SFPO_POOL_OK;
}

CudaPages::Current::Current(const CudaPages& pages) : driver_(pages.driver_) {
  code = driver_.check(driver_.cuCtxPushCurrent(pages.context_), "use the GPU");
}

CudaPages::Current::~Current() {
  CUcontext old;
  if (code == SFPO_POOL_OK) driver_.cuCtxPopCurrent(&old);
}

CudaPages::~CudaPages() {
  if (context_ == nullptr) return;
  {
    Current current(*this);
    for (auto& ticket : tickets_) driver_.cuEventDestroy(ticket.second);
    for (CUevent event : events_) driver_.cuEventDestroy(event);
    if (base_ != 0) driver_.cuMemAddressFree(base_, size_);
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
}

CUmemAllocationProp CudaPages::properties() const {
  CUmemAllocationProp found{};
  found.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  found.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  found.location.id = device_;
  return found;
}

Code CudaPages::reserve(uint32_t slots, uint64_t page) {
  // The context that JAX has too, so that its streams are this pool's.
  Code code = driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "use the GPU");
  if (code != SFPO_POOL_OK) return code;
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  CUmemAllocationProp wanted = properties();
  size_t least = 0;
  code = driver_.check(
      driver_.cuMemGetAllocationGranularity(&least, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "tell the size of its pages");
  if (code != SFPO_POOL_OK) return code;
  if (page % least != 0) {
    return fail(SFPO_POOL_INVALID, "`page` must be a multiple of the GPU's %s, got %s",
                in_words(least).c_str(), in_words(page).c_str());
  }
  page_ = page;
  size_ = slots * page;
  handles_.assign(slots, 0);
  return driver_.check(driver_.cuMemAddressReserve(&base_, size_, page, 0, 0),
                       "reserve addresses");
}

Code CudaPages::map(uint32_t first, uint32_t count) {
  Current current(*this);
  Code code = current.code;
  uint32_t slot = first;
  while (slot < first + count && code == SFPO_POOL_OK) {
    code = map_one(slot);
    if (code == SFPO_POOL_OK) ++slot;
  }
  if (code == SFPO_POOL_OK) code = allow(first, count);
  if (code == SFPO_POOL_OK) return code;
  std::string why = last_message();
  while (slot-- > first) unmap_one(slot);
  last_message() = why;
  return code;
}

Code CudaPages::map_one(uint32_t slot) {
  CUmemAllocationProp wanted = properties();
  CUmemGenericAllocationHandle handle = 0;
  Code code = driver_.check(driver_.cuMemCreate(&handle, page_, &wanted, 0), "make a page");
  if (code != SFPO_POOL_OK) return code;
  code = driver_.check(driver_.cuMemMap(at(slot), page_, 0, handle, 0), "map a page");
  if (code == SFPO_POOL_OK) {
    handles_[slot] = handle;
  } else {
    driver_.cuMemRelease(handle);
  }
  return code;
}

Code CudaPages::allow(uint32_t first, uint32_t count) {
  CUmemAccessDesc access{};
  access.location = properties().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver_.check(driver_.cuMemSetAccess(at(first), count * page_, &access, 1),
                       "give access to pages");
}

Code CudaPages::unmap(uint32_t first, uint32_t count) {
  Current current(*this);
  Code code = current.code;
  for (uint32_t slot = first; slot < first + count && code == SFPO_POOL_OK; ++slot) {
    code = unmap_one(slot);
    // All or none: what has gone comes again.
    if (code != SFPO_POOL_OK && slot > first) map(first, slot - first);
  }
  return code;
}

Code CudaPages::unmap_one(uint32_t slot) {
  Code code = driver_.check(driver_.cuMemUnmap(at(slot), page_), "unmap a page");
  if (code != SFPO_POOL_OK) return code;
  driver_.cuMemRelease(handles_[slot]);
  handles_[slot] = 0;
  return code;
}

Code CudaPages::move(uint32_t from, uint32_t to) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  Code code = driver_.check(driver_.cuMemUnmap(at(from), page_), "unmap a page");
  if (code != SFPO_POOL_OK) return code;
  std::swap(handles_[from], handles_[to]);
  code = driver_.check(driver_.cuMemMap(at(to), page_, 0, handles_[to], 0), "map a page");
  if (code == SFPO_POOL_OK && (code = allow(to, 1)) == SFPO_POOL_OK) return code;
  std::string why = last_message();
  driver_.cuMemUnmap(at(to), page_);
  std::swap(handles_[from], handles_[to]);
  driver_.cuMemMap(at(from), page_, 0, handles_[from], 0);
  allow(from, 1);
  last_message() = why;
  return code;
}

Code CudaPages::copy(uint64_t from, uint64_t to, uint64_t size) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  CUresult result = driver_.cuMemcpyDtoD(base_ + to, base_ + from, size);
  // Between addresses of a GPU it does not wait by itself.
  if (result == CUDA_SUCCESS) result = driver_.cuStreamSynchronize(nullptr);
  return driver_.check(result, "copy a block");
}

Code CudaPages::fill(uint64_t offset, uint64_t size, uint8_t byte) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  CUresult result = driver_.cuMemsetD8(base_ + offset, byte, size);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamSynchronize(nullptr);
  return driver_.check(result, "fill a block");
}

Code CudaPages::find_other(uint64_t offset, uint64_t size, uint8_t byte, uint64_t* found) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  // In pieces, for debugging need not be fast and should not need much memory.
  std::vector<uint8_t> piece(std::min<uint64_t>(size, 1 << 20));
  for (uint64_t begin = 0; begin < size; begin += piece.size()) {
    uint64_t count = std::min<uint64_t>(piece.size(), size - begin);
    Code code = driver_.check(driver_.cuMemcpyDtoH(piece.data(), base_ + offset + begin, count),
                              "read a block");
    if (code != SFPO_POOL_OK) return code;
    for (uint64_t i = 0; i < count; ++i) {
      if (piece[i] == byte) continue;
      *found = begin + i;
      return SFPO_POOL_OK;
    }
  }
  *found = size;
  return SFPO_POOL_OK;
}

Code CudaPages::record(void* stream, uint64_t* ticket) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  if (events_.empty()) {
    CUevent made;
    Code code =
        driver_.check(driver_.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), "make an event");
    if (code != SFPO_POOL_OK) return code;
    events_.push_back(made);
  }
  Code code = driver_.check(driver_.cuEventRecord(events_.back(), static_cast<CUstream>(stream)),
                            "record an event");
  if (code != SFPO_POOL_OK) return code;
  tickets_.emplace(last_ticket_ + 1, events_.back());
  events_.pop_back();
  *ticket = ++last_ticket_;
  return SFPO_POOL_OK;
}

Code CudaPages::passed(uint64_t ticket, bool* is_passed) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  CUresult result = driver_.cuEventQuery(tickets_[ticket]);
  *is_passed = result == CUDA_SUCCESS;
  if (result == CUDA_ERROR_NOT_READY) return SFPO_POOL_OK;
  if (*is_passed) keep_event(ticket);
  return driver_.check(result, "tell how far a stream is");
}

Code CudaPages::wait(uint64_t ticket) {
  Current current(*this);
  if (current.code != SFPO_POOL_OK) return current.code;
  Code code = driver_.check(driver_.cuEventSynchronize(tickets_[ticket]), "wait for a stream");
  if (code == SFPO_POOL_OK) keep_event(ticket);
  return code;
}

void CudaPages::keep_event(uint64_t ticket) {
  events_.push_back(tickets_[ticket]);
  tickets_.erase(ticket);
}

Code CudaPages::submit(void*) {
  return fail(SFPO_POOL_INVALID, "the streams of a GPU move on by themselves");
}

Code CudaPages::complete(void*) { return submit(nullptr); }

}  // namespace sfpo::pool
