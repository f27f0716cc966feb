// The rows of many arrays as one grid: a table of jobs that is a kernel's own parameter, so
// that a call is one launch for dozens of leaves, copies nothing to the device, waits for
// nothing, and can be recorded in a command buffer.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace sfpo {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarps = 4;  // of a block; each does one row
inline constexpr int kThreads = kWarps * kWarpSize;

// All parameters of a kernel together may have 4 KB; some are left for its scalars.
inline constexpr size_t kTableBytes = 4096 - 128;

template <typename Job>
struct RowTable {
  static constexpr int kCapacity = (kTableBytes - sizeof(int64_t)) / (sizeof(Job) + 4);

  Job jobs[kCapacity];
  uint32_t ends[kCapacity];  // rows of all jobs up to and with this one
  int32_t count = 0;

  uint32_t rows() const { return count > 0 ? ends[count - 1] : 0; }

  uint32_t blocks() const { return (rows() + kWarps - 1) / kWarps; }
};

// Rows that one job may have, and rows of a whole table: less than a grid's blocks allow.
inline constexpr int64_t kMaxRows = int64_t{1} << 30;

// What `Layout::chunks` cuts by for jobs of at most `kMaxRows` rows of 8 entries or more.
inline constexpr int64_t kJobEntries = kMaxRows * 8;

// Collects jobs, and launches a kernel for each table that is full, then for the rest. Where
// there is nothing to do, nothing is launched.
template <typename Job>
class RowLauncher {
 public:
  using Launch = std::function<cudaError_t(const RowTable<Job>&)>;

  explicit RowLauncher(Launch launch) : launch_(std::move(launch)) {}

  void add(const Job& job, int64_t rows) {
    if (rows <= 0) return;
    bool is_full = table_.count == RowTable<Job>::kCapacity;
    if (is_full || table_.rows() + rows > 2 * kMaxRows) flush();
    table_.ends[table_.count] = table_.rows() + static_cast<uint32_t>(rows);
    table_.jobs[table_.count] = job;
    ++table_.count;
  }

  // The first error, of all launches.
  cudaError_t finish() {
    flush();
    return status_;
  }

 private:
  void flush() {
    if (table_.count > 0 && status_ == cudaSuccess) status_ = launch_(table_);
    table_.count = 0;
  }

  Launch launch_;
  RowTable<Job> table_;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace sfpo
