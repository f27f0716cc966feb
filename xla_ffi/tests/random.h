// Inputs for the stand-alone tests: small, cheap to draw, and full of edge cases.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "core/portable.h"

namespace sfpo {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // Uniform in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }

  bool flag() { return engine_() & 1; }

  uint64_t bits() { return engine_(); }

  // Mostly ordinary numbers; now and then zeros of both signs, subnormals and any bits.
  float number(bool is_finite) {
    switch (integer(0, 15)) {
      case 0:
        return 0.0f;
      case 1:
        return -0.0f;
      case 2:
        return from_bits(static_cast<uint32_t>(engine_()) & 0x807fffffu);
      case 3: {
        uint32_t bits = static_cast<uint32_t>(engine_());
        if (is_finite && (bits & 0x7f800000u) >= 0x60000000u) bits &= 0x9fffffffu;
        return from_bits(bits);
      }
      default:
        return std::normal_distribution<float>()(engine_);
    }
  }

  // Exactly as long as it says, so that a sanitizer sees a step beyond it.
  std::vector<float> numbers(int64_t count, bool is_finite = true) {
    std::vector<float> found(count);
    for (float& x : found) x = number(is_finite);
    return found;
  }

  std::vector<uint8_t> bytes(int64_t count) {
    std::vector<uint8_t> found(count);
    for (uint8_t& x : found) x = static_cast<uint8_t>(engine_());
    return found;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace sfpo
