#include "memory_pool/host_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sfpo::pool {
namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

Code refuse(const char* what, uint64_t size) {
  int error = errno;
  return fail(SFPO_POOL_SYSTEM, "the system could not %s %s: %s", what, in_words(size).c_str(),
              std::strerror(error));
}

}  // namespace

HostPages::~HostPages() {
  if (range_ != nullptr) munmap(range_, range_size_);
}

Code HostPages::reserve(uint32_t slots, uint64_t page) {
  uint64_t least = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (page % least != 0) {
    return fail(SFPO_POOL_INVALID, "`page` must be a multiple of the system's %s, got %s",
                in_words(least).c_str(), in_words(page).c_str());
  }
  page_ = page;
  // Room to begin at a multiple of the page, as huge pages must.
  range_size_ = (uint64_t{slots} + 1) * page;
  void* range = mmap(nullptr, range_size_, PROT_NONE, kReserved, -1, 0);
  if (range == MAP_FAILED) return refuse("reserve addresses for", range_size_);
  range_ = range;
  base_ = reinterpret_cast<char*>((reinterpret_cast<uint64_t>(range) + page - 1) / page * page);
  return SFPO_POOL_OK;
}

Code HostPages::map(uint32_t first, uint32_t count) {
  if (mprotect(at(first), count * page_, PROT_READ | PROT_WRITE) != 0) {
    return refuse("map", count * page_);
  }
#ifdef MADV_HUGEPAGE
  // Where the kernel has no huge pages it says so, and ordinary ones do.
  madvise(at(first), count * page_, MADV_HUGEPAGE);
#endif
  return SFPO_POOL_OK;
}

Code HostPages::unmap(uint32_t first, uint32_t count) {
  // One call that both frees the memory and forbids the addresses.
  void* found = mmap(at(first), count * page_, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  return found == MAP_FAILED ? refuse("unmap", count * page_) : SFPO_POOL_OK;
}

Code HostPages::move(uint32_t from, uint32_t to) {
#ifdef MREMAP_DONTUNMAP
  // Without that flag there would be a hole in the range for a moment, for any thread's mmap.
  void* moved =
      mremap(at(from), page_, page_, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, at(to));
  if (moved != MAP_FAILED) {
    // What stays behind has no memory any more. Should it remain accessible, that is harmless.
    unmap(from, 1);
    return SFPO_POOL_OK;
  }
#endif
  // An older kernel: the page goes, another comes. Nobody needs what was in it.
  if (Code code = map(to, 1)) return code;
  Code code = unmap(from, 1);
  if (code != SFPO_POOL_OK) unmap(to, 1);
  return code;
}

Code HostPages::copy(uint64_t from, uint64_t to, uint64_t size) {
  std::memcpy(base_ + to, base_ + from, size);
  return SFPO_POOL_OK;
}

Code HostPages::fill(uint64_t offset, uint64_t size, uint8_t byte) {
  std::memset(base_ + offset, byte, size);
  return SFPO_POOL_OK;
}

Code HostPages::find_other(uint64_t offset, uint64_t size, uint8_t byte, uint64_t* found) {
  const char* begin = base_ + offset;
  uint64_t i = 0;
  // A range equals itself moved by one where all its bytes are alike.
  bool is_alike = size == 0 || (static_cast<uint8_t>(begin[0]) == byte &&
                                std::memcmp(begin, begin + 1, size - 1) == 0);
  if (is_alike) {
    i = size;
  } else {
    while (static_cast<uint8_t>(begin[i]) == byte) ++i;
  }
  *found = i;
  return SFPO_POOL_OK;
}

Code HostPages::record(void* stream, uint64_t* ticket) {
  Ticket made{stream, streams_[stream].submitted};
  tickets_.emplace(last_ticket_ + 1, made);
  *ticket = ++last_ticket_;
  return SFPO_POOL_OK;
}

Code HostPages::passed(uint64_t ticket, bool* is_passed) {
  auto found = tickets_.find(ticket);
  *is_passed = streams_[found->second.stream].completed >= found->second.submitted;
  if (*is_passed) tickets_.erase(found);
  return SFPO_POOL_OK;
}

Code HostPages::wait(uint64_t ticket) {
  bool is_passed = false;
  passed(ticket, &is_passed);
  if (is_passed) return SFPO_POOL_OK;
  return fail(SFPO_POOL_BUSY,
              "a block was freed on a stream whose work is not complete; on the "
              "host `sfpo_pool_stream_complete` is what completes it");
}

Code HostPages::submit(void* stream) {
  ++streams_[stream].submitted;
  return SFPO_POOL_OK;
}

Code HostPages::complete(void* stream) {
  Stream& found = streams_[stream];
  if (found.completed == found.submitted) {
    return fail(SFPO_POOL_INVALID, "the stream has nothing to complete");
  }
  ++found.completed;
  return SFPO_POOL_OK;
}

}  // namespace sfpo::pool
