// Times blocks allocated, touched and freed: the pool, malloc, and mmap alone.
//
//     pool_bench MIB LIVE ROUNDS
//
// A round allocates LIVE blocks of MIB MiB, writes one byte into every 4 KiB of each, and frees
// them. Prints a line for each contender: its name, and microseconds for one block in each round.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "memory_pool/sfpo_pool.h"

namespace {

// Microseconds that this thread has run, in the kernel too: what else runs here is not counted.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

void touch(void* block, uint64_t size) {
  volatile char* bytes = static_cast<char*>(block);
  // Each in another line of its page: the first bytes of all would fall into the same few sets
  // of the caches, wherever pages lie side by side in memory.
  for (uint64_t i = 0; i < size; i += 4096) bytes[i + i / 64 % 4096] = 1;
}

void check(bool is_right) {
  if (is_right) return;
  std::fprintf(stderr, "error: no memory: %s\n", sfpo_pool_last_message());
  std::exit(1);
}

sfpo_pool* make_pool(uint64_t cache) {
  sfpo_pool_options options;
  sfpo_pool_default_options(&options);
  options.cache = cache;
  sfpo_pool* pool = nullptr;
  check(sfpo_pool_create(&options, &pool) == SFPO_POOL_OK);
  return pool;
}

// Microseconds for one block: the median of batches long enough for the clock and short enough
// that most meet no interruption.
template <typename Allocate, typename Free>
double time_round(uint64_t size, std::vector<void*>& blocks, Allocate allocate, Free free_one) {
  constexpr double kBatch = 50, kRound = 5000;
  std::vector<double> batches;
  for (double all = 0; all < kRound;) {
    int repetitions = 0;
    double passed = 0;
    for (double began = now(); passed < kBatch; ++repetitions) {
      for (void*& block : blocks) {
        block = allocate(size);
        touch(block, size);
      }
      for (void* block : blocks) free_one(block);
      if (repetitions % 8 != 0 && passed > 0) continue;
      passed = now() - began;
    }
    batches.push_back(passed / repetitions / static_cast<double>(blocks.size()));
    all += passed;
  }
  std::nth_element(batches.begin(), batches.begin() + static_cast<long>(batches.size() / 2),
                   batches.end());
  return batches[batches.size() / 2];
}

struct Contender {
  const char* name;
  sfpo_pool* pool;
  std::vector<double> times;
};

double run(const Contender& contender, uint64_t size, std::vector<void*>& blocks) {
  if (sfpo_pool* pool = contender.pool) {
    return time_round(
        size, blocks,
        [=](uint64_t wanted) {
          void* block = nullptr;
          check(sfpo_pool_allocate(pool, wanted, 0, &block) == SFPO_POOL_OK);
          return block;
        },
        [=](void* block) { check(sfpo_pool_free(pool, block) == SFPO_POOL_OK); });
  }
  if (contender.name[1] == 'a') return time_round(size, blocks, std::malloc, std::free);
  return time_round(
      size, blocks,
      [](uint64_t wanted) {
        void* block =
            mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(block != MAP_FAILED);
        return block;
      },
      [=](void* block) { munmap(block, size); });
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) {
    std::fprintf(stderr, "error: pool_bench MIB LIVE ROUNDS\n");
    return 2;
  }
  uint64_t size = static_cast<uint64_t>(std::atol(words[1])) << 20;
  std::vector<void*> blocks(static_cast<size_t>(std::atol(words[2])));
  // A process of one thread has a malloc without locks, which no JAX program is.
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  Contender contenders[] = {{"malloc", nullptr, {}},
                            {"mmap", nullptr, {}},
                            {"pool", make_pool(uint64_t{64} << 20), {}},
                            {"pool, no cache", make_pool(0), {}}};
  // Interleaved, so that what else runs here meets all of them; malloc learns in the first rounds
  // which sizes to keep.
  for (int round = -3; round < std::atoi(words[3]); ++round) {
    for (Contender& contender : contenders) {
      double time = run(contender, size, blocks);
      if (round >= 0) contender.times.push_back(time);
    }
  }
  for (const Contender& contender : contenders) {
    std::printf("%s", contender.name);
    for (double time : contender.times) std::printf("\t%.4f", time);
    std::puts("");
    if (contender.pool) check(sfpo_pool_destroy(contender.pool) == SFPO_POOL_OK);
  }
  is_over = true;
  other.join();
  return 0;
}
