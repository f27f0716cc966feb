// One pool, many threads: blocks keep what is written in them, and all numbers end at zero.
//
//     pool_threads [CALLS]    of each of four threads; 20,000 where it is not given
#include <deque>
#include <thread>

#include "tests/pool_model.h"

namespace sfpo::pool {
namespace {

constexpr int kThreads = 4;

struct Shared {
  std::unique_ptr<Pool> pool;
  // A thread frees what another one has allocated.
  Lock lock;
  std::deque<Block> given;
};

void work(Shared& shared, uint64_t seed, long calls) {
  Pool& pool = *shared.pool;
  Random random(seed);
  std::vector<Block> mine;
  void* stream = reinterpret_cast<void*>(seed % 2);
  for (long i = 0; i < calls; ++i) {
    int64_t dice = random.integer(0, 99);
    if (dice < 45) {
      Block block{nullptr, 0, static_cast<uint64_t>(random.integer(1, 40000)), random.bits(), 0};
      void* address = nullptr;
      if (dice < 15) {
        if (pool.allocate_movable(block.size, &block.handle) != SFPO_POOL_OK) continue;
        require(pool.pin(block.handle, &address) == SFPO_POOL_OK, "no pin");
        write_marks(static_cast<char*>(address), block);
        require(pool.unpin(block.handle) == SFPO_POOL_OK, "no unpin");
      } else {
        if (pool.allocate(block.size, 0, &address) != SFPO_POOL_OK) continue;
        block.address = static_cast<char*>(address);
        write_marks(block.address, block);
      }
      mine.push_back(block);
    } else if (dice < 90 && !mine.empty()) {
      std::swap(
          mine[static_cast<size_t>(random.integer(0, static_cast<int64_t>(mine.size()) - 1))],
          mine.back());
      Block block = mine.back();
      mine.pop_back();
      if (block.handle != 0) {
        void* address = nullptr;
        require(pool.pin(block.handle, &address) == SFPO_POOL_OK, "no pin");
        check_marks(static_cast<char*>(address), block);
        require(pool.unpin(block.handle) == SFPO_POOL_OK, "no unpin");
        require(pool.free_movable(block.handle) == SFPO_POOL_OK, "no free");
      } else if (dice < 60) {
        check_marks(block.address, block);
        require(pool.free(block.address) == SFPO_POOL_OK, "no free");
      } else if (dice < 70) {
        require(pool.free_on_stream(block.address, stream) == SFPO_POOL_OK, "no free");
      } else {
        // Given away, for one that another thread has given.
        std::lock_guard<Lock> guard(shared.lock);
        shared.given.push_back(block);
        mine.push_back(shared.given.front());
        shared.given.pop_front();
      }
    } else if (dice < 94) {
      require(pool.submit(stream) == SFPO_POOL_OK, "no submit");
      require(pool.complete(stream) == SFPO_POOL_OK, "no complete");
    } else if (dice == 94) {
      uint64_t given_back = 0;
      require(pool.compact(&given_back) == SFPO_POOL_OK, "no compaction");
    } else if (dice == 95) {
      require(pool.trim() == SFPO_POOL_OK, "no trim");
    } else {
      sfpo_pool_statistics found;
      require(pool.statistics(&found) == SFPO_POOL_OK, "no statistics");
      require(found.mapped >= found.in_use && found.mapped <= found.limit, "numbers do not agree");
      char foreign = 0;
      require(pool.free(&foreign) == SFPO_POOL_FOREIGN, "a foreign address was freed");
    }
  }
  std::lock_guard<Lock> guard(shared.lock);
  shared.given.insert(shared.given.end(), mine.begin(), mine.end());
}

void run(long calls, bool is_poisoned) {
  sfpo_pool_options options{};
  options.page = 65536;
  options.limit = 400 * options.page;
  options.cache = 20 * options.page;
  options.poison = is_poisoned;
  options.compact_every = 1000;
  Shared shared;
  Code code = SFPO_POOL_OK;
  shared.pool = Pool::make(std::make_unique<HostPages>(), options, &code);
  require(code == SFPO_POOL_OK, "no pool");
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { work(shared, i, calls); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Block& block : shared.given) {
    code =
        block.handle ? shared.pool->free_movable(block.handle) : shared.pool->free(block.address);
    require(code == SFPO_POOL_OK, "no free");
  }
  require(shared.pool->wait() == SFPO_POOL_OK && shared.pool->check() == SFPO_POOL_OK, "no end");
  require(shared.pool->trim() == SFPO_POOL_OK, "no trim");
  sfpo_pool_statistics found;
  require(shared.pool->statistics(&found) == SFPO_POOL_OK, "no statistics");
  require(found.in_use == 0 && found.mapped == 0 && found.blocks == 0, "something is left");
}

}  // namespace
}  // namespace sfpo::pool

int main(int count, char** words) {
  long calls = count > 1 ? std::atol(words[1]) : 20000;
  for (bool is_poisoned : {false, true}) sfpo::pool::run(calls, is_poisoned);
  std::printf("pool_threads: nothing wrong in %ld calls of each of 4 threads\n", calls);
  return 0;
}
