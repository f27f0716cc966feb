// CUDA's driver, found at run time: the library links and loads where there is none.
#pragma once

#include <cuda.h>

#include "memory_pool/status.h"

namespace sfpo::pool {

// cuda.h renames some calls to later versions of them, here as in the driver's file.
// clang-format off
#define SFPO_CUDA_CALLS(call)                                                             \
  call(cuInit) call(cuGetErrorString) call(cuDeviceGet) call(cuDeviceGetAttribute)        \
  call(cuDevicePrimaryCtxRetain) call(cuDevicePrimaryCtxRelease) call(cuCtxPushCurrent)   \
  call(cuCtxPopCurrent) call(cuMemGetAllocationGranularity) call(cuMemAddressReserve)     \
  call(cuMemAddressFree) call(cuMemCreate) call(cuMemRelease) call(cuMemMap)              \
  call(cuMemUnmap) call(cuMemSetAccess) call(cuMemsetD8) call(cuMemcpyDtoD)               \
  call(cuMemcpyDtoH) call(cuStreamSynchronize) call(cuEventCreate) call(cuEventRecord)    \
  call(cuEventQuery) call(cuEventSynchronize) call(cuEventDestroy)
// clang-format on

struct CudaDriver {
#define SFPO_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  SFPO_CUDA_CALLS(SFPO_CUDA_MEMBER)
#undef SFPO_CUDA_MEMBER

  // The driver in this file; libcuda.so.1 where it is null. It stays loaded.
  Code load(const char* file);
  // The code of a call, and a line where it failed.
  Code check(CUresult result, const char* what) const;
};

}  // namespace sfpo::pool
