// All CUDA kernels and their handlers, for the CPU: compile with this folder first among the
// includes, so that its cuda_runtime.h is found.
#include <cuda_runtime.h>

#include "cuda/adamw8bit.cc"
#include "cuda/adamw8bit.cu"
#include "cuda/magnitude_threshold.cc"
#include "cuda/onebit_update.cc"
#include "cuda/onebit_update.cu"
#include "cuda/select_block_rows.cu"
#include "cuda/select_long_rows.cu"
#include "cuda/select_short_rows.cu"
#include "cuda/sign_decode.cc"
#include "cuda/sign_decode.cu"
#include "cuda/sign_encode.cc"
#include "cuda/sign_encode.cu"
#include "cuda/sign_serve.cc"
#include "cuda/sign_serve.cu"
#include "cuda/sparsify.cc"
#include "cuda/sparsify.cu"

extern "C" __attribute__((visibility("default"))) void sfpo_run_backward(int is_backward) {
  emulated::state.order =
      is_backward != 0 ? emulated::Order::kBackward : emulated::Order::kForward;
}
