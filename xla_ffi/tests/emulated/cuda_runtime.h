// CUDA kernels on a CPU, so that their results can be tested without a GPU: what they use of
// CUDA, a block after the other, each of its threads with a stack of its own.
//
// A thread runs until it needs the other lanes of its warp or of its block. Which of them goes on
// first can be changed: results that depend on it are missing a __syncwarp. Lanes that meet in
// different functions, and lanes that wait for one that has returned, end the process with a
// message. Speed, the limits of a device, and its memory model between warps are not emulated.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "xla/ffi/api/ffi.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define threadIdx (emulated::state.thread->index)
#define blockIdx (emulated::state.block)

using cudaError_t = int;
inline constexpr cudaError_t cudaSuccess = 0;
inline constexpr cudaError_t cudaErrorInvalidConfiguration = 9;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

struct CUstream_st;
using cudaStream_t = CUstream_st*;

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace emulated {

inline constexpr int kLanes = 32;
inline constexpr size_t kStack = 1 << 17;

// Threads that wait for each other.
struct Meeting {
  const char* name = "none";
  int arrived = 0;
  unsigned number = 0;
};

struct Warp {
  uint64_t values[2][kLanes];  // those of one meeting are read while the next one fills
  Meeting meeting;
};

struct Thread {
  dim3 index;
  Warp* warp;
  ucontext_t context;
  std::vector<char> stack;
  bool is_done;
};

enum class Order { kForward, kBackward };

struct State {
  std::mutex mutex;
  Order order = Order::kForward;
  dim3 block;
  int threads = 0;  // of a block
  Meeting everyone;
  Thread* thread = nullptr;
  ucontext_t scheduler;
  const std::function<void()>* body = nullptr;
  unsigned progress = 0;  // counts what shows that threads are not stuck
};
inline State state;

[[noreturn]] inline void stop(const char* problem, const char* where) {
  std::fprintf(stderr, "emulated CUDA: %s (%s)\n", problem, where);
  std::abort();
}

// Waits until so many threads have come.
inline void wait_for(Meeting& meeting, const char* name, int threads) {
  if (meeting.arrived == 0) meeting.name = name;
  if (std::strcmp(meeting.name, name) != 0) stop("lanes meet in different functions", name);
  unsigned number = meeting.number;
  ++state.progress;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.number;
  }
  // Even the last to arrive lets the others go first.
  do {
    swapcontext(&state.thread->context, &state.scheduler);
  } while (meeting.number == number);
}

// Gives a value to the warp, and returns everyone's once all lanes have given theirs.
inline const uint64_t* meet(const char* name, unsigned mask, uint64_t value) {
  Warp* warp = state.thread->warp;
  if (mask != 0xffffffffu) stop("only whole warps are emulated", name);
  uint64_t* values = warp->values[warp->meeting.number % 2];
  values[state.thread->index.x % kLanes] = value;
  wait_for(warp->meeting, name, kLanes);
  return values;
}

inline void run_thread() {
  (*state.body)();
  state.thread->is_done = true;
  ++state.progress;
  swapcontext(&state.thread->context, &state.scheduler);
}

inline void prepare(Thread& thread, unsigned index, Warp* warp) {
  thread.index = dim3(index, 0, 0);
  thread.warp = warp;
  thread.is_done = false;
  thread.stack.resize(kStack);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.data();
  thread.context.uc_stack.ss_size = thread.stack.size();
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
}

inline void run_block(std::vector<Thread>& threads, std::vector<Warp>& warps) {
  for (unsigned i = 0; i < threads.size(); ++i) prepare(threads[i], i, &warps[i / kLanes]);
  for (size_t running = threads.size(); running > 0;) {
    unsigned before = state.progress;
    for (size_t i = 0; i < threads.size(); ++i) {
      bool is_forward = state.order == Order::kForward;
      Thread& thread = threads[is_forward ? i : threads.size() - 1 - i];
      if (thread.is_done) continue;
      state.thread = &thread;
      swapcontext(&state.scheduler, &thread.context);
      running -= thread.is_done;
    }
    if (state.progress == before) {
      stop("lanes wait for one that has returned", state.thread->warp->meeting.name);
    }
  }
}

template <typename T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

}  // namespace emulated

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ...) <= 4096, "more than every CUDA has room for");
  if (config->gridDim.x == 0) return cudaErrorInvalidConfiguration;
  std::lock_guard<std::mutex> lock(emulated::state.mutex);
  std::function<void()> body = [&] { kernel(arguments...); };
  emulated::state.body = &body;
  emulated::state.threads = config->blockDim.x;
  std::vector<emulated::Thread> threads(config->blockDim.x);
  std::vector<emulated::Warp> warps(config->blockDim.x / emulated::kLanes);
  for (unsigned i = 0; i < config->gridDim.x; ++i) {
    emulated::state.block = dim3(i, 0, 0);
    emulated::run_block(threads, warps);
  }
  return cudaSuccess;
}

inline void __syncthreads() {
  emulated::wait_for(emulated::state.everyone, "__syncthreads", emulated::state.threads);
}

inline void __syncwarp() { emulated::meet("__syncwarp", ~0u, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulated::as<T>(
      emulated::meet("__shfl_sync", mask, emulated::bits_of(value))[source % emulated::kLanes]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  int source = (threadIdx.x % emulated::kLanes) ^ lanes;
  return emulated::as<T>(
      emulated::meet("__shfl_xor_sync", mask, emulated::bits_of(value))[source]);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  int lane = threadIdx.x % emulated::kLanes;
  int source = lane < lanes ? lane : lane - lanes;
  return emulated::as<T>(emulated::meet("__shfl_up_sync", mask, emulated::bits_of(value))[source]);
}

inline int __reduce_add_sync(unsigned mask, int value) {
  const uint64_t* values = emulated::meet("__reduce_add_sync", mask, emulated::bits_of(value));
  int sum = 0;
  for (int i = 0; i < emulated::kLanes; ++i) sum += emulated::as<int>(values[i]);
  return sum;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const uint64_t* values = emulated::meet("__reduce_max_sync", mask, value);
  unsigned most = 0;
  for (int i = 0; i < emulated::kLanes; ++i) {
    if (values[i] > most) most = static_cast<unsigned>(values[i]);
  }
  return most;
}

// Threads take turns: what they do in between is atomic.
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  unsigned old = *to;
  *to += value;
  return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int min(int a, int b) { return a < b ? a : b; }

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

// A handler that asks for a stream gets none: everything happens at once.
template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*,
                                    xla::ffi::DiagnosticEngine&) {
    return nullptr;
  }
};
