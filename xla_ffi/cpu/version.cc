// The version of XLA's interface that this library was built against: a runtime that is older
// must not be given its handlers.
#include "xla/ffi/api/c_api.h"

extern "C" __attribute__((visibility("default"))) int sfpo_ffi_api_major() {
  return XLA_FFI_API_MAJOR;
}

extern "C" __attribute__((visibility("default"))) int sfpo_ffi_api_minor() {
  return XLA_FFI_API_MINOR;
}
