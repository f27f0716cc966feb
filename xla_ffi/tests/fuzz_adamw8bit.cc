// Random rows through the blocks of the one-byte AdamW, against the equations written out entry
// by entry. Nothing is contracted and nothing is summed, so that they agree bit for bit.
//
//     fuzz_adamw8bit [inputs] [seed]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cpu/adamw8bit_block.h"
#include "tests/random.h"

namespace sfpo {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_adamw8bit: %s\n", what);
  std::abort();
}

// NaNs have many bits, and which ones is the compiler's choice.
bool is_same(float x, float y) {
  return to_bits(x) == to_bits(y) || (std::isnan(x) && std::isnan(y));
}

// One row of a leaf, and the blocks that it is cut into.
struct Row {
  int64_t width, block, blocks;
  std::vector<float> g, m_scales, v_scales, parameters;
  std::vector<int8_t> m;
  std::vector<uint8_t> v;
  AdamwNumbers numbers;
  Seed seed, rounding;
  uint32_t number;  // of the first entry

  explicit Row(Random& random) {
    width = random.integer(1, 600);
    block = random.integer(1, kMaxBlock);
    blocks = (width + block - 1) / block;
    bool is_finite = random.integer(0, 3) > 0;
    g = random.numbers(width, is_finite);
    float size = std::ldexp(1.0f, static_cast<int>(random.integer(-60, 40)));
    if (random.flag()) {
      for (float& x : g) x *= size;
    }
    m_scales = random.numbers(blocks, is_finite);
    v_scales = random.numbers(blocks, is_finite);
    for (float& x : m_scales) x = std::fabs(x);
    for (float& x : v_scales) x = std::fabs(x);
    parameters = random.numbers(width, is_finite);
    v = random.bytes(width);
    for (uint8_t byte : random.bytes(width)) m.push_back(static_cast<int8_t>(byte));
    bool is_zero = random.integer(0, 7) == 0;
    if (is_zero) std::fill(v.begin(), v.end(), uint8_t{0});
    numbers = {0.9f,    1.0f - 0.9f, 0.999f, 1.0f - 0.999f, 0.3f, random.flag() ? 1e-8f : 0.0f,
               0x1p-7f, 0.125f};
    auto word = [&] { return static_cast<uint32_t>(random.integer(0, 0xffffffff)); };
    seed = {word(), word()};
    rounding = {word(), word()};
    number = random.flag() ? 0 : word();
  }

  int64_t length(int64_t start) const { return std::min(block, width - start); }
};

// What a block becomes, entry by entry.
struct Wanted {
  std::vector<float> u;
  std::vector<int> m, v;
  float m_scale, v_scale;

  Wanted(const Row& row, int64_t start) {
    const AdamwNumbers& n = row.numbers;
    int64_t size = row.length(start), block = start / row.block;
    std::vector<float> m_roots, v_roots;
    for (int64_t i = start; i < start + size; ++i) {
      float g = row.g[i];
      float root = static_cast<float>(row.m[i]) * row.m_scales[block];
      float old_m = root * std::fabs(root);
      root = static_cast<float>(row.v[i]) * row.v_scales[block];
      float old_v = (root * root) * (root * root);
      if (row.v[i] == 0) old_v = 0.0f;
      if (row.v[i] > 0 && old_v < kSmallestNormal) old_v = kSmallestNormal;
      float new_m = n.b1 * old_m + n.m_share * g;
      float new_v = n.b2 * old_v + n.v_share * g * g;
      float deviation = std::sqrt(new_v);
      u.push_back(deviation > 0.0f ? new_m * n.factor / (deviation + n.eps) : 0.0f);
      m_roots.push_back(std::copysign(std::sqrt(std::fabs(new_m)), new_m));
      v_roots.push_back(std::sqrt(deviation));
    }
    m_scale = largest(m_roots) * (1.0f / 127);
    v_scale = largest(v_roots) * (1.0f / 255);
    float m_inverse = m_scale > 0.0f ? 1.0f / m_scale : 0.0f;
    float v_inverse = v_scale > 0.0f ? 1.0f / v_scale : 0.0f;
    for (int64_t i = 0; i < size; ++i) {
      float code = std::nearbyint(m_roots[i] * m_inverse);
      code = std::isnan(code) ? 127.0f : std::fmin(std::fmax(code, -127.0f), 127.0f);
      m.push_back(static_cast<int>(code));
      uint32_t bits = random_bits(row.number + static_cast<uint32_t>(start + i), row.seed);
      float unit = static_cast<float>(bits >> 8) / 16777216.0f;
      code = v_roots[i] * v_inverse + unit;
      code = std::isnan(code) ? 255.0f : std::fmin(std::floor(code), 255.0f);
      v.push_back(std::max(static_cast<int>(code), v_roots[i] > 0.0f ? 1 : 0));
    }
  }

  static float largest(const std::vector<float>& roots) {
    float most = 0.0f;
    for (float root : roots) {
      if (std::isnan(root)) return root;
      most = std::fmax(most, std::fabs(root));
    }
    return most;
  }
};

// To nearest: of both neighbours the nearer one, of two as near that whose last bit is 0. At
// random: upwards where the remainder and the random bits together reach a unit.
uint16_t rounded(float x, const Seed* seed, uint32_t number) {
  uint32_t bits = to_bits(x), low = bits & 0xffffu;
  uint16_t down = static_cast<uint16_t>(bits >> 16);
  if (std::isinf(x)) return down;
  bool is_up = low > 0x8000u || (low == 0x8000u && (down & 1) != 0);
  if (seed != nullptr) is_up = low + (random_bits(number, *seed) & 0xffffu) > 0xffffu;
  return static_cast<uint16_t>(down + (is_up ? 1 : 0));
}

void fuzz_moments(Random& random) {
  Row row(random);
  bool is_in_place = random.flag();
  std::vector<float> g = row.g, u(row.width, -1.0f);
  std::vector<int8_t> m = row.m, new_m(row.width);
  std::vector<uint8_t> v = row.v, new_v(row.width);
  std::vector<float> m_scales = row.m_scales, v_scales = row.v_scales;
  std::vector<float> new_m_scales(row.blocks, -1.0f), new_v_scales(row.blocks, -1.0f);
  std::vector<float>& to_u = is_in_place ? g : u;
  std::vector<int8_t>& to_m = is_in_place ? m : new_m;
  std::vector<uint8_t>& to_v = is_in_place ? v : new_v;
  std::vector<float>& to_m_scales = is_in_place ? m_scales : new_m_scales;
  std::vector<float>& to_v_scales = is_in_place ? v_scales : new_v_scales;
  for (int64_t start = 0, i = 0; start < row.width; start += row.block, ++i) {
    int64_t length = row.length(start);
    update_block(
        g.data() + start, {m.data() + start, &m_scales[i], v.data() + start, &v_scales[i]}, length,
        row.numbers, row.number + static_cast<uint32_t>(start), row.seed, to_u.data() + start,
        {to_m.data() + start, &to_m_scales[i], to_v.data() + start, &to_v_scales[i]});
    Wanted wanted(row, start);
    require(is_same(to_m_scales[i], wanted.m_scale), "a scale of m is wrong");
    require(is_same(to_v_scales[i], wanted.v_scale), "a scale of v is wrong");
    for (int64_t j = 0; j < length; ++j) {
      require(is_same(to_u[start + j], wanted.u[j]), "a direction is wrong");
      require(to_m[start + j] == wanted.m[j], "a code of m is wrong");
      require(to_v[start + j] == wanted.v[j], "a code of v is wrong");
    }
  }
}

void fuzz_parameters(Random& random) {
  Row row(random);
  bool is_in_place = random.flag(), is_random = random.flag();
  const Seed* seed = is_random ? &row.rounding : nullptr;
  float decay = random.flag() ? row.numbers.weight_decay : 0.0f;
  float rate = row.numbers.learning_rate;
  std::vector<float> p = row.parameters, out(row.width);
  std::vector<BFloat16> halves, half_out(row.width);
  for (float x : p) halves.push_back({static_cast<uint16_t>(to_bits(x) >> 16)});
  std::vector<BFloat16> half_from = halves;
  std::vector<float>& to = is_in_place ? p : out;
  std::vector<BFloat16>& half_to = is_in_place ? half_from : half_out;
  for (int64_t start = 0; start < row.width; start += row.block) {
    int64_t length = row.length(start);
    uint32_t number = row.number + static_cast<uint32_t>(start);
    move_block(p.data() + start, row.g.data() + start, length, decay, rate, to.data() + start);
    move_block(half_from.data() + start, row.g.data() + start, length, decay, rate, number, seed,
               half_to.data() + start);
  }
  for (int64_t i = 0; i < row.width; ++i) {
    auto moved = [&](float x) {
      float step = decay == 0.0f ? row.g[i] : row.g[i] + decay * x;
      return x - rate * step;
    };
    require(is_same(to[i], moved(row.parameters[i])), "a parameter is wrong");
    float x = moved(widen(halves[i]));
    if (std::isnan(x)) {
      require(std::isnan(widen(half_to[i])), "a bfloat16 parameter is no NaN");
      continue;
    }
    uint16_t wanted = rounded(x, seed, row.number + static_cast<uint32_t>(i));
    require(half_to[i].bits == wanted, "a bfloat16 parameter is wrong");
  }
}

}  // namespace
}  // namespace sfpo

int main(int argc, char** argv) {
  int64_t inputs = argc > 1 ? std::atoll(argv[1]) : 10000;
  sfpo::Random random(argc > 2 ? std::atoll(argv[2]) : 0);
  for (int64_t i = 0; i < inputs; ++i) {
    if (i % 2 == 0) {
      sfpo::fuzz_moments(random);
    } else {
      sfpo::fuzz_parameters(random);
    }
  }
  std::printf("fuzz_adamw8bit: %lld inputs, nothing wrong\n", static_cast<long long>(inputs));
  return 0;
}
