// A driver of CUDA without a GPU: the calls that the memory pool makes, on memory of the host.
//
// It is stricter than a real one: addresses must be reserved, a page is mapped once, is readable
// only once access was given, and goes when it is neither held nor mapped. A mistake ends the
// process with a line. Streams move on when the test says so.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#pragma GCC visibility push(default)

namespace {

constexpr size_t kPage = 65536;
constexpr size_t kMemory = 4096 * kPage;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Page {
  size_t offset;
  size_t size;
  bool is_held = true;
  CUdeviceptr at = 0;
};

struct Stream {
  long given = 0;
  long done = 0;
};

struct Event {
  CUstream stream;
  long given;
};

struct State {
  int file = memfd_create("emulated", MFD_CLOEXEC);
  size_t in_use = 0;
  size_t next_offset = 0;
  std::map<CUmemGenericAllocationHandle, Page> pages;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped;
  std::map<CUdeviceptr, size_t> reserved;
  std::map<CUstream, Stream> streams;
  std::map<CUevent, Event> events;
  unsigned long long next = 1;
  int contexts = 0;
  int users = 0;
};

State& state() {
  static State one;
  return one;
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulated driver: %s\n", what);
  std::abort();
}

void require_context() { require(state().contexts > 0, "no context is current"); }

bool is_reserved(CUdeviceptr at, size_t size) {
  auto found = state().reserved.upper_bound(at);
  if (found == state().reserved.begin()) return false;
  --found;
  return at + size <= found->first + found->second;
}

void drop_where_unused(CUmemGenericAllocationHandle handle) {
  Page& page = state().pages.at(handle);
  if (page.is_held || page.at != 0) return;
  state().in_use -= page.size;
  fallocate(state().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(page.offset), static_cast<off_t>(page.size));
  state().pages.erase(handle);
}

bool has_passed(const Event& event) { return state().streams[event.stream].done >= event.given; }

}  // namespace

extern "C" {

// For tests: a stream is given work, and has done it; what is mapped, and who uses the GPU.
void emulated_submit(CUstream stream) { ++state().streams[stream].given; }
void emulated_complete(CUstream stream) { ++state().streams[stream].done; }
size_t emulated_in_use() { return state().in_use; }
int emulated_users() { return state().users; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the emulation";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return number == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* found, CUdevice_attribute, CUdevice) {
  *found = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  ++state().users;
  *context = reinterpret_cast<CUcontext>(&state());
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  --state().users;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  require(context == reinterpret_cast<CUcontext>(&state()), "another context");
  ++state().contexts;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext*) {
  require_context();
  --state().contexts;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* found, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *found = kPage;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* found, size_t size, size_t alignment, CUdeviceptr,
                             unsigned long long) {
  require(size % kPage == 0, "half a page is reserved");
  char* range = static_cast<char*>(mmap(nullptr, size + alignment, PROT_NONE, kReserved, -1, 0));
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  CUdeviceptr begin = reinterpret_cast<CUdeviceptr>(range);
  *found = (begin + alignment - 1) / alignment * alignment;
  munmap(range, *found - begin);
  munmap(reinterpret_cast<void*>(*found + size), alignment - (*found - begin));
  state().reserved[*found] = size;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  require(state().reserved.count(at) && state().reserved[at] == size, "not what was reserved");
  auto next = state().mapped.lower_bound(at);
  require(next == state().mapped.end() || next->first >= at + size, "pages are still mapped");
  munmap(reinterpret_cast<void*>(at), size);
  state().reserved.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* wanted, unsigned long long) {
  require(size % kPage == 0 && size > 0, "half a page is made");
  require(wanted->type == CU_MEM_ALLOCATION_TYPE_PINNED, "a page of another kind");
  if (state().in_use + size > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t offset = state().next_offset;
  state().next_offset += size;
  if (ftruncate(state().file, static_cast<off_t>(state().next_offset)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  state().in_use += size;
  *handle = state().next++;
  state().pages[*handle] = {offset, size};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  require(state().pages.count(handle) && state().pages[handle].is_held, "released twice");
  state().pages[handle].is_held = false;
  drop_where_unused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  require(state().pages.count(handle), "a page that is none is mapped");
  Page& page = state().pages[handle];
  require(offset == 0 && size == page.size && page.at == 0, "a page is mapped in parts, or twice");
  require(is_reserved(at, size) && !state().mapped.count(at), "mapped where it may not be");
  void* found = mmap(reinterpret_cast<void*>(at), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                     state().file, static_cast<off_t>(page.offset));
  require(found != MAP_FAILED, "no memory");
  page.at = at;
  state().mapped[at] = handle;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  require(state().mapped.count(at), "nothing is mapped there");
  CUmemGenericAllocationHandle handle = state().mapped[at];
  Page& page = state().pages.at(handle);
  require(page.size == size, "half a page is unmapped");
  mmap(reinterpret_cast<void*>(at), size, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  state().mapped.erase(at);
  page.at = 0;
  drop_where_unused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc* access, size_t count) {
  require(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "another access");
  for (CUdeviceptr page = at; page < at + size;) {
    require(state().mapped.count(page), "access to what is not mapped");
    page += state().pages.at(state().mapped[page]).size;
  }
  mprotect(reinterpret_cast<void*>(at), size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr at, unsigned char byte, size_t size) {
  require_context();
  std::memset(reinterpret_cast<void*>(at), byte, size);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
  require_context();
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  require_context();
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream) {
  require_context();
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  require_context();
  *event = reinterpret_cast<CUevent>(state().next++);
  state().events[*event] = {nullptr, 0};
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  require_context();
  state().events.at(event) = {stream, state().streams[stream].given};
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  return has_passed(state().events.at(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
  Event found = state().events.at(event);
  Stream& stream = state().streams[found.stream];
  if (!has_passed(found)) stream.done = found.given;
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  require(state().events.erase(event) == 1, "no such event");
  return CUDA_SUCCESS;
}

}  // extern "C"
