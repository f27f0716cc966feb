// What lets one inline function compile for the host and for a device.
//
// Arithmetic in core/ is IEEE float32, rounded after each operation: no contraction to
// fused multiply-adds, true division and true square roots. The build sets
// -ffp-contract=off for the host and --fmad=false for CUDA, so that both give the same
// bits. The jnp twins are compiled by XLA, which contracts as it likes: they agree within
// the rounding of the operands.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SFPO_INLINE __host__ __device__ __forceinline__
#else
#define SFPO_INLINE inline __attribute__((always_inline))
#endif

namespace sfpo {

inline constexpr uint32_t kSignBit = 0x80000000u;

SFPO_INLINE uint32_t to_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

SFPO_INLINE float from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

}  // namespace sfpo
