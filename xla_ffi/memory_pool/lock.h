// The pool's lock: half the price of a mutex where nobody else wants it, which is nearly always.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace sfpo::pool {

class Lock {
 public:
  void lock() {
    for (int tries = 0; is_held_.exchange(true, std::memory_order_acquire); ++tries) {
      // A few hundred cycles are a whole call of another thread; a compaction takes longer.
      while (tries < kSpins && is_held_.load(std::memory_order_relaxed)) ++tries;
      if (tries < kSpins) continue;
      if (tries < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }
  void unlock() { is_held_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 256;
  static constexpr int kYields = 64;

  std::atomic<bool> is_held_{false};
};

}  // namespace sfpo::pool
