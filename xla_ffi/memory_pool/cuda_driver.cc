#include "memory_pool/cuda_driver.h"

#include <dlfcn.h>

namespace sfpo::pool {

Code CudaDriver::load(const char* file) {
  if (file == nullptr) file = "libcuda.so.1";
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return fail(SFPO_POOL_UNAVAILABLE, "no driver of CUDA: %s", dlerror());
  }
#define SFPO_CUDA_TEXT(name) #name
#define SFPO_CUDA_FIND(name)                                                                  \
  name = reinterpret_cast<decltype(name)>(dlsym(library, SFPO_CUDA_TEXT(name)));              \
  if (name == nullptr) {                                                                      \
    return fail(SFPO_POOL_UNAVAILABLE, "the driver '%s' is too old: it has no " #name, file); \
  }
  SFPO_CUDA_CALLS(SFPO_CUDA_FIND)
#undef SFPO_CUDA_FIND
#undef SFPO_CUDA_TEXT
  return SFPO_POOL_OK;
}

Code CudaDriver::check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return SFPO_POOL_OK;
  const char* why = nullptr;
  cuGetErrorString(result, &why);
  return fail(SFPO_POOL_SYSTEM, "CUDA's driver could not %s: %s", what,
              why != nullptr ? why : "for a reason that it has no words for");
}

}  // namespace sfpo::pool
