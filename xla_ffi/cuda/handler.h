// What the handlers of all CUDA kernels have in common; for the host's compiler alone, which
// reads XLA's headers five times as fast as nvcc does.
#pragma once

#include <cuda_runtime.h>

#include <initializer_list>
#include <string>

#include "cuda/row_table.h"
#include "ffi_helpers.h"
#include "layout.h"

namespace sfpo {

using Stream = ffi::PlatformStream<cudaStream_t>;

// Only launches, always the same ones: XLA may record them once and replay them.
inline constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

// A kernel keeps an entry's place in its row in 32 bits.
inline constexpr int64_t kMaxWidth = int64_t{1} << 30;

inline ffi::Error to_error(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("sfpo_jax: CUDA: ") + cudaGetErrorString(status) +
                              "; SFPO_JAX_FFI=0 runs the jnp versions");
}

// Calls add(chunk, width) for the rows of each piece, and with `with_padding` for those that
// no piece fills.
template <typename Add>
ffi::Error for_each_chunk(const Layout& layout, bool with_padding, const Add& add) {
  for (const Chunk& chunk : layout.chunks(with_padding, kJobEntries)) {
    int64_t width = layout.width(chunk.group);
    if (width > kMaxWidth) return invalid("`widths` must be at most 2^30 on a GPU");
    add(chunk, static_cast<int32_t>(width));
  }
  return ffi::Error::Success();
}

}  // namespace sfpo
