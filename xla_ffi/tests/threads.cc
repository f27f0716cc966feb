// parallel_for under threads that come late, are busy, or are inside loops themselves.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace sfpo {
namespace {

// What parallel_for needs of XLA's pool.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

  template <typename F>
  void Schedule(F&& task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(std::forward<F>(task));
    }
    ready_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return is_closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable ready_;
  bool is_closed_ = false;
};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "threads: %s\n", what);
  std::abort();
}

// Every chunk runs once, and all that they wrote is seen after the loop.
template <typename AnyPool>
void check_sum(AnyPool& pool, int64_t count) {
  std::vector<int64_t> written(count, 0);
  parallel_for(pool, count, 1 << 30, [&](int64_t i) { written[i] += i + 1; });
  for (int64_t i = 0; i < count; ++i) require(written[i] == i + 1, "a chunk ran another time");
}

// What a chunk throws comes out of the loop, when every other one has run.
void check_throw(Pool& pool, int64_t count) {
  std::vector<int64_t> written(count, 0);
  bool is_thrown = false;
  try {
    parallel_for(pool, count, 1 << 30, [&](int64_t i) {
      if (i % 3 == 0) throw std::bad_alloc();
      ++written[i];
    });
  } catch (const std::bad_alloc&) {
    is_thrown = true;
  }
  require(is_thrown, "an exception is lost");
  for (int64_t i = 0; i < count; ++i) require(written[i] == (i % 3 != 0), "a chunk is lost");
}

// A pool that has no memory for another task.
class FullPool {
 public:
  explicit FullPool(Pool& pool) : pool_(pool) {}
  int64_t num_threads() const { return 4; }

  template <typename F>
  void Schedule(F&& task) {
    if (++tasks_ == 2) throw std::bad_alloc();
    pool_.Schedule(std::forward<F>(task));
  }

 private:
  Pool& pool_;
  int tasks_ = 0;
};

}  // namespace
}  // namespace sfpo

int main() {
  using sfpo::Pool;
  Pool pool(4), none(0), one(1);
  for (int round = 0; round < 2000; ++round) {
    for (int64_t count : {0, 1, 2, 3, 7, 64, 200}) {
      sfpo::check_sum(pool, count);
      sfpo::check_sum(none, count);
      sfpo::check_sum(one, count);
    }
  }
  for (int round = 0; round < 200; ++round) {
    for (int64_t count : {1, 2, 40}) {
      sfpo::check_throw(pool, count);
      sfpo::check_throw(none, count);
    }
    sfpo::FullPool full(pool);
    sfpo::check_sum(full, 40);
  }
  // Loops inside loops, more of them than threads: nobody waits for a task in the queue.
  for (int round = 0; round < 100; ++round) {
    sfpo::parallel_for(pool, 16, 1 << 30, [&](int64_t) { sfpo::check_sum(pool, 33); });
  }
  // Several callers share a pool.
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 500; ++round) sfpo::check_sum(pool, 40);
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::puts("threads: nothing wrong");
  return 0;
}
