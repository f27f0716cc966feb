// What the system takes for memory that is mapped, touched and given back, and for pages that are
// moved to another address: the floor under any pool, and why the host's pages are what they are.
//
//     pool_floor MIB    prints a line for each way: its name, and microseconds (medians of 15)
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace {

constexpr uint64_t kHuge = 2 << 20;
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kBoth = PROT_READ | PROT_WRITE;

// Microseconds that this thread has run, in the kernel too: what else runs here is not counted.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::perror(what);
  std::exit(1);
}

void touch(char* at, uint64_t size) {
  for (uint64_t i = 0; i < size; i += 4096) static_cast<volatile char*>(at)[i] = 1;
}

void map_file(char* at, uint64_t size, int file) {
  check(mmap(at, size, kBoth, MAP_SHARED | MAP_FIXED, file, 0) == at, "map a file");
}

void map_none(char* at, uint64_t size) {
  check(mmap(at, size, PROT_NONE, kPrivate | MAP_FIXED, -1, 0) == at, "unmap");
}

void map_huge(char* at, uint64_t size) {
  check(mprotect(at, size, kBoth) == 0, "map");
  madvise(at, size, MADV_HUGEPAGE);
}

template <typename Run>
void report(const char* name, Run run) {
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    double began = now();
    run();
    times.push_back(now() - began);
  }
  std::nth_element(times.begin(), times.begin() + 7, times.end());
  std::printf("%s\t%.4f\n", name, times[7]);
}

}  // namespace

int main(int count, char** words) {
  uint64_t size = static_cast<uint64_t>(count == 2 ? std::atol(words[1]) : 0) << 20;
  if (size == 0 || size % kHuge != 0) {
    std::fprintf(stderr, "error: pool_floor MIB, an even number\n");
    return 2;
  }
  void* range = mmap(nullptr, 3 * size, PROT_NONE, kPrivate, -1, 0);
  check(range != MAP_FAILED, "reserve");
  char* first =
      reinterpret_cast<char*>((reinterpret_cast<uint64_t>(range) + kHuge - 1) / kHuge * kHuge);
  char* second = first + size;
  int file = memfd_create("floor", MFD_CLOEXEC);
  check(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "make a file");

  report("anonymous", [&] {
    check(mprotect(first, size, kBoth) == 0, "map");
    touch(first, size);
    map_none(first, size);
  });
  report("anonymous, huge pages", [&] {
    map_huge(first, size);
    touch(first, size);
    map_none(first, size);
  });
  report("memfd", [&] {
    map_file(first, size, file);
    touch(first, size);
    map_none(first, size);
    check(ftruncate(file, 0) == 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "empty");
  });
  map_huge(first, size);
  touch(first, size);
  report("moved: anonymous, huge pages", [&] {
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    check(mremap(first, size, size, flags, second) == second, "move");
    map_none(first, size);
    touch(second, size);
    std::swap(first, second);
  });
  map_none(first, size);
  map_file(first, size, file);
  touch(first, size);
  report("moved: memfd", [&] {
    map_file(second, size, file);
    map_none(first, size);
    touch(second, size);
    std::swap(first, second);
  });
  return 0;
}
