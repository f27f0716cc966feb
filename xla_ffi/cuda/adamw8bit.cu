#include "core/adamw8bit.h"
#include "core/hash.h"
#include "cuda/adamw8bit.h"
#include "cuda/launch.cuh"
#include "cuda/small_quads.cuh"

namespace sfpo {
namespace {

// Of a lane: all of a block is in the registers of a warp from its reading to its writing.
constexpr int kQuads = kMaxBlock / kStep;

struct BlockPlace {
  int64_t start;  // its first entry
  int length;
};

__device__ __forceinline__ BlockPlace find_block(const AdamwJob& job, uint32_t i) {
  // Rows are whole numbers of blocks nearly always; a division takes longer than the update.
  if (static_cast<int64_t>(job.in_row) * job.block == job.width) {
    return {static_cast<int64_t>(i) * job.block, job.block};
  }
  uint32_t row = i / job.in_row;
  int64_t within = static_cast<int64_t>(i - row * job.in_row) * job.block;
  return {row * job.width + within, live_length(job.width, within, job.block)};
}

// Parameters of either type, as float32.
class Parameters {
 public:
  __device__ __forceinline__ Parameters(const AdamwJob& job, int64_t start, int length)
      : job_(job), start_(start), length_(length) {}

  __device__ __forceinline__ Quad load(int entry) const {
    if (job_.parameters == nullptr) return {};
    if (!job_.is_narrow) {
      const float* row = static_cast<const float*>(job_.parameters) + start_;
      return load_quad(row, entry, length_, is_aligned(row));
    }
    const BFloat16* row = static_cast<const BFloat16*>(job_.parameters) + start_;
    QuadOf<BFloat16> narrow = load_quad_of(row, entry, length_);
    Quad quad;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) quad.at[j] = widen(narrow.at[j]);
    return quad;
  }

  // What was not moved has the bits that were read.
  __device__ __forceinline__ void store(int entry, const Quad& quad, bool is_moved) const {
    if (!job_.is_narrow) {
      float* row = static_cast<float*>(job_.out) + start_;
      store_quad(row, entry, length_, is_aligned(row), quad);
      return;
    }
    QuadOf<BFloat16> narrow;
    bool is_random = job_.rounding != nullptr;
    Seed seed = {};
    if (is_random) seed = {job_.rounding[0], job_.rounding[1]};
    uint32_t number = job_.number + static_cast<uint32_t>(start_) + entry;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      float p = quad.at[j];
      BFloat16 same{static_cast<uint16_t>(to_bits(p) >> 16)};
      BFloat16 moved =
          is_random ? round_at_random(p, random_bits(number + j, seed)) : round_to_nearest(p);
      narrow.at[j] = is_moved ? moved : same;
    }
    store_quad_of(static_cast<BFloat16*>(job_.out) + start_, entry, length_, narrow);
  }

 private:
  const AdamwJob& job_;
  int64_t start_;
  int length_;
};

__device__ __forceinline__ AdamwNumbers load_numbers(const float* x) {
  return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]};
}

__device__ __forceinline__ float largest_of_warp(uint32_t bits) {
  return from_bits(__reduce_max_sync(kAllLanes, bits));
}

__global__ void __launch_bounds__(kThreads)
    update_blocks(const __grid_constant__ RowTable<AdamwJob> table, AdamwStep step) {
  RowPlace place = find_row(table);
  if (place.job < 0) return;
  const AdamwJob& job = table.jobs[place.job];
  auto [start, length] = find_block(job, static_cast<uint32_t>(place.row));
  const float* g_row = job.g + start;
  Parameters parameters(job, start, length);
  bool has_parameters = job.parameters != nullptr, taken = *step.taken;
  float m_scale = job.m_scales[place.row], v_scale = job.v_scales[place.row];

  Quad g[kQuads], p[kQuads];
  QuadOf<int8_t> m[kQuads];
  QuadOf<uint8_t> v[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    int entry = q * kStep + kQuad * lane_id();
    g[q] = load_quad(g_row, entry, length, is_aligned(g_row));
    m[q] = load_quad_of(job.m + start, entry, length);
    v[q] = load_quad_of(job.v + start, entry, length);
    p[q] = parameters.load(entry);
  }

  if (taken) {
    AdamwNumbers n = load_numbers(step.numbers);
    Seed seed{step.seed[0], step.seed[1]};
    float decay = job.is_decayed ? n.weight_decay : 0.0f;
    Quad m_root[kQuads], v_root[kQuads];
    uint32_t m_most = 0, v_most = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      int entry = q * kStep + kQuad * lane_id();
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float new_m = next_m(decode_signed(m[q].at[j], m_scale), g[q].at[j], n);
        float new_v = next_v(decode_unsigned(v[q].at[j], v_scale), g[q].at[j], n);
        float root_v = sqrtf(new_v);
        float u = direction(new_m, root_v, n);
        p[q].at[j] = has_parameters ? next_parameter(p[q].at[j], u, decay, n.learning_rate) : u;
        m_root[q].at[j] = signed_root(new_m);
        v_root[q].at[j] = sqrtf(root_v);
        // Bits of floats that are not negative have the order of the floats.
        if (entry + j < length) {
          m_most = max(m_most, to_bits(m_root[q].at[j]) & ~kSignBit);
          v_most = max(v_most, to_bits(v_root[q].at[j]) & ~kSignBit);
        }
      }
    }
    m_scale = largest_of_warp(m_most) * kSignedUnit;
    v_scale = largest_of_warp(v_most) * kUnsignedUnit;
    float m_inverse = inverse_of(m_scale), v_inverse = inverse_of(v_scale);
    uint32_t number = job.number + static_cast<uint32_t>(start);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      uint32_t first = number + q * kStep + kQuad * lane_id();
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float random = random_unit(random_bits(first + j, seed));
        m[q].at[j] = static_cast<int8_t>(encode_signed(m_root[q].at[j], m_inverse));
        v[q].at[j] = static_cast<uint8_t>(encode_unsigned(v_root[q].at[j], v_inverse, random));
      }
    }
  }

  // Without a step, what was read; directions, for which nothing was, are zeros.
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    int entry = q * kStep + kQuad * lane_id();
    store_quad_of(job.new_m + start, entry, length, m[q]);
    store_quad_of(job.new_v + start, entry, length, v[q]);
    parameters.store(entry, p[q], taken);
  }
  if (lane_id() == 0) {
    job.new_m_scales[place.row] = m_scale;
    job.new_v_scales[place.row] = v_scale;
  }
}

}  // namespace

cudaError_t launch_adamw8bit(const RowTable<AdamwJob>& table, const AdamwStep& step,
                             cudaStream_t stream) {
  return launch_rows(update_blocks, table, stream, step);
}

}  // namespace sfpo
