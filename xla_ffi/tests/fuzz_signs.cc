// Random rows through the sign kernels, against the equations written out entry by entry.
//
//     fuzz_signs [inputs] [seed]
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cpu/adam_rows.h"
#include "cpu/sign_rows.h"
#include "tests/random.h"

namespace sfpo {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_signs: %s\n", what);
  std::abort();
}

bool bit(const std::vector<uint8_t>& bytes, int64_t i) { return bytes[i / 8] >> (i % 8) & 1; }

// As near as another order of the same sums comes.
bool is_near(double found, double wanted, double size) {
  return std::fabs(found - wanted) <= 1e-5 * size + 1e-30;
}

void fuzz_encode(Random& random) {
  int64_t width = 8 * random.integer(1, 40), length = random.integer(1, width);
  auto x = random.numbers(length), m = random.numbers(length), e = random.numbers(length);
  auto v = random.numbers(length);
  bool has_m = random.flag(), has_e = random.flag(), has_v = random.flag();
  std::vector<uint8_t> signs(width / 8), live(width / 8);
  std::vector<float> lost = e;
  float scale = -1.0f, b1 = has_m ? 0.9f : 0.0f;
  RowSource from{x.data(), has_m ? m.data() : nullptr, has_e ? lost.data() : nullptr,
                 has_v ? v.data() : nullptr};
  encode_row(from, length, width, {b1, 1.0f - b1, 1.5f}, signs.data(), live.data(), &scale,
             has_e ? lost.data() : nullptr);
  double sum = 0.0, most = 0.0;
  int64_t count = 0;
  std::vector<float> c(length);
  for (int64_t i = 0; i < length; ++i) {
    c[i] = has_m ? b1 * m[i] + (1.0f - b1) * x[i] : x[i];
    if (has_e) c[i] += e[i];
    require(bit(signs, i) == std::signbit(c[i]), "a sign is wrong");
    bool is_live = !has_v || v[i] > 0.0f;
    require(bit(live, i) == is_live, "a live bit is wrong");
    if (!is_live) continue;
    sum += std::fabs(static_cast<double>(c[i]));
    most = std::fmax(most, std::fabs(static_cast<double>(c[i])));
    ++count;
  }
  for (int64_t i = length; i < width; ++i) {
    require(!bit(signs, i) && !bit(live, i), "padding has a bit");
  }
  double wanted = sum / static_cast<double>(count > 0 ? count : 1) * 1.5;
  require(is_near(scale, wanted, wanted), "a scale is wrong");
  for (int64_t i = 0; has_e && i < length; ++i) {
    float left = bit(live, i) ? c[i] - std::copysign(scale, c[i]) : 0.0f;
    require(to_bits(lost[i]) == to_bits(left) || lost[i] == left, "an error is wrong");
  }
}

void fuzz_serve(Random& random) {
  int64_t width = 8 * random.integer(1, 40), ranks = random.integer(1, 5);
  int64_t rows = random.integer(1, 3), row = random.integer(0, rows - 1);
  auto signs = random.bytes(ranks * rows * width / 8), live = random.bytes(width / 8);
  auto scales = random.numbers(ranks * rows), error = random.numbers(width);
  bool has_error = random.flag();
  std::vector<uint8_t> reply(width / 8);
  std::vector<float> lost = error;
  float scale = -1.0f;
  serve_row(signs.data() + row * (width / 8), scales.data() + row, ranks, rows, live.data(),
            has_error ? lost.data() : nullptr, width, 1.0f, reply.data(), &scale,
            has_error ? lost.data() : nullptr);
  double sum = 0.0;
  int64_t count = 0;
  for (int64_t i = 0; i < width; ++i) {
    float c = 0.0f;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      float s = scales[rank * rows + row];
      bool negative = signs[(rank * rows + row) * (width / 8) + i / 8] >> (i % 8) & 1;
      c += from_bits(to_bits(s) ^ (negative ? kSignBit : 0u));
    }
    c *= 1.0f / static_cast<float>(ranks);
    if (!bit(live, i)) c = 0.0f;
    if (has_error) c += error[i];
    require(bit(reply, i) == std::signbit(c), "a served sign is wrong");
    if (!bit(live, i)) {
      if (has_error) require(lost[i] == 0.0f, "a dead entry has an error");
      continue;
    }
    sum += std::fabs(static_cast<double>(c));
    ++count;
    if (has_error) require(lost[i] == c - std::copysign(scale, c), "a server error is wrong");
  }
  double wanted = sum / static_cast<double>(count > 0 ? count : 1);
  require(is_near(scale, wanted, wanted), "a served scale is wrong");
}

void fuzz_update(Random& random) {
  int64_t width = 8 * random.integer(1, 40), length = random.integer(1, width);
  auto signs = random.bytes(width / 8);
  auto v = random.numbers(length), p = random.numbers(length);
  float scale = std::fabs(random.number(true));
  bool has_p = random.flag(), has_m = random.flag(), decays = random.flag();
  std::vector<float> out = p, m(has_m ? length : 0), decoded(length);
  for (float& x : v) x = std::fabs(x);
  AdamFactors factors{0.19f, 0.1f, 1e-8f, 0.01f, 1e-3f, 0.1f};
  onebit_row(signs.data(), scale, v.data(), has_p ? out.data() : nullptr, decays, length, width,
             factors, out.data(), has_m ? m.data() : nullptr);
  decode_row(signs.data(), scale, v.data(), length, width, decoded.data());
  double sum = 0.0;
  int64_t count = 0;
  for (float x : v) sum += x, count += x > 0.0f;
  double least = 0.01 * sum / static_cast<double>(count > 0 ? count : 1);
  for (int64_t i = 0; i < length; ++i) {
    float value = v[i] > 0.0f ? (bit(signs, i) ? -scale : scale) : 0.0f;
    require(decoded[i] == value, "a decoded entry is wrong");
    if (has_m) require(m[i] == value, "a momentum is wrong");
    double u = value / 0.19 / (std::sqrt(std::fmax(v[i], least) / 0.1) + 1e-8);
    double wanted = u;
    if (has_p) wanted = p[i] - 1e-3 * (u + (decays ? 0.1 * p[i] : 0.0));
    double size = std::fabs(u) + std::fabs(has_p ? p[i] : 0.0);
    require(is_near(out[i], wanted, size), "an update is wrong");
  }
}

}  // namespace
}  // namespace sfpo

int main(int argc, char** argv) {
  int64_t inputs = argc > 1 ? std::atoll(argv[1]) : 20000;
  sfpo::Random random(argc > 2 ? std::atoll(argv[2]) : 0);
  for (int64_t i = 0; i < inputs; ++i) {
    switch (i % 3) {
      case 0:
        sfpo::fuzz_encode(random);
        break;
      case 1:
        sfpo::fuzz_serve(random);
        break;
      default:
        sfpo::fuzz_update(random);
    }
  }
  std::printf("fuzz_signs: %lld inputs, nothing wrong\n", static_cast<long long>(inputs));
  return 0;
}
