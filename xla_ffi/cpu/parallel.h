// A loop over chunks on XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

namespace sfpo {

// XLA's pool hands a task over by atomics that the thread sanitizer does not see, for their
// library is not instrumented; it is told of them.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
inline char handed_over;
inline void hand_over() { __tsan_release(&handed_over); }
inline void take_over() { __tsan_acquire(&handed_over); }
#else
inline void hand_over() {}
inline void take_over() {}
#endif

// work(body) on another thread.
template <typename Work, typename Body>
class Task {
 public:
  Task(const Work& work, const Body& body) : work_(work), body_(&body) { hand_over(); }
  Task(const Task& other) : work_(other.work_), body_(other.body_) { hand_over(); }
  void operator()() const {
    take_over();
    work_(*body_);
  }

 private:
  Work work_;
  const Body* body_;
};

// What a thread should have to do: waking it costs about as much as a tenth of this.
inline constexpr int64_t kEntriesPerThread = 1 << 18;

// Calls body(i) for i in [0, count), on the caller's thread and others of the pool.
//
// Chunks are claimed one by one, and the caller works too: it waits only for chunks that
// another thread has begun. A pool whose threads are all busy, or all inside loops such as
// this one, therefore delays nothing and cannot deadlock. What a body throws on any thread, as
// where memory ends, is thrown here once no chunk is running. `pool` is an
// xla::ffi::ThreadPool, or has its `num_threads` and `Schedule`; `entries` is
// all there is to do.
template <typename Pool, typename Body>
void parallel_for(Pool& pool, int64_t count, int64_t entries, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    int64_t finished = 0;
    std::exception_ptr thrown;  // the last one
  };
  // Threads that start late find nothing to do, after the caller has left.
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count](const Body& run) {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) {
      try {
        run(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->thrown = std::current_exception();
      }
    }
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->finished += mine;
    if (shared->finished == count) shared->done.notify_all();
  };
  int64_t worth = entries / kEntriesPerThread;
  int64_t helpers = std::min<int64_t>({count, worth, pool.num_threads()}) - 1;
  // A claimed chunk is run before its claimer reports it, so `body` outlives every use.
  for (int64_t i = 0; i < helpers; ++i) {
    try {
      pool.Schedule(Task(work, body));
    } catch (...) {
      break;  // those that there are, and the caller, do it all
    }
  }
  work(body);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->done.wait(lock, [&] { return shared->finished == count; });
  if (shared->thrown != nullptr) std::rethrow_exception(shared->thrown);
}

}  // namespace sfpo
