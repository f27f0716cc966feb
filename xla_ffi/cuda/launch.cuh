// Kernels started without the triple brackets, which only nvcc can read.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/row_table.h"

namespace sfpo {

// `blocks` of `threads`; `arguments` follow the table.
template <typename Job, typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(RowTable<Job>, Parameters...), uint32_t blocks, int threads,
                   const RowTable<Job>& table, cudaStream_t stream, Arguments... arguments) {
  static_assert(sizeof(RowTable<Job>) <= kTableBytes, "too large to be a parameter");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, table, arguments...);
  // The same error would else be found by whoever asks next.
  cudaError_t last = cudaGetLastError();
  return status != cudaSuccess ? status : last;
}

// A warp for each row of `table`.
template <typename Job, typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(RowTable<Job>, Parameters...), const RowTable<Job>& table,
                        cudaStream_t stream, Arguments... arguments) {
  return launch(kernel, table.blocks(), kThreads, table, stream, arguments...);
}

// A block for each row.
template <typename Job, typename... Parameters, typename... Arguments>
cudaError_t launch_blocks(void (*kernel)(RowTable<Job>, Parameters...), const RowTable<Job>& table,
                          int threads, cudaStream_t stream, Arguments... arguments) {
  return launch(kernel, table.rows(), threads, table, stream, arguments...);
}

}  // namespace sfpo
