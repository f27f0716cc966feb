#pragma once

#include "cuda/row_table.h"

namespace sfpo {

// Blocks of one leaf, whole rows of them: a warp does a block. Each pointer is at the first;
// what is new may lie where what is old does.
struct AdamwJob {
  const float* g;
  const int8_t* m;
  const float* m_scales;
  const uint8_t* v;
  const float* v_scales;
  const void* parameters;  // null: `out` gets the directions
  int8_t* new_m;
  float* new_m_scales;
  uint8_t* new_v;
  float* new_v_scales;
  void* out;
  const uint32_t* rounding;  // two numbers on the device; null: to nearest
  int64_t width;             // of a row
  uint32_t in_row;           // blocks
  uint32_t number;           // of the first entry in its leaf, modulo 2^32
  int16_t block;
  bool is_narrow;  // parameters are bfloat16
  bool is_decayed;
};

// The numbers of a step, on the device.
struct AdamwStep {
  const float* numbers;  // in the order of AdamwNumbers
  const uint32_t* seed;
  const bool* taken;
};

cudaError_t launch_adamw8bit(const RowTable<AdamwJob>& table, const AdamwStep& step,
                             cudaStream_t stream);

}  // namespace sfpo
