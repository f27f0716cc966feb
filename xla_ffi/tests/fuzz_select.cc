// Random rows through the selection, against a sort.
//
//     fuzz_select [inputs] [seed]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "cpu/select_row.h"
#include "cpu/sparsify_rows.h"
#include "tests/random.h"

namespace sfpo {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_select: %s\n", what);
  std::abort();
}

// A row of any dtype, and its keys.
struct Row {
  std::vector<float> x, addend;
  std::vector<uint16_t> halves;
  std::vector<uint8_t> live;
  KeySource source;
  std::vector<int64_t> keys;

  Row(Random& random, int64_t size) {
    bool is_half = random.integer(0, 3) == 0, is_tied = random.integer(0, 2) == 0;
    x = random.numbers(size, false);
    // A few values, the larger ones first, last or anywhere.
    if (is_tied) {
      for (float& value : x) value = static_cast<float>(random.integer(-3, 3));
    }
    if (random.integer(0, 3) == 0) std::sort(x.begin(), x.end());
    if (!is_half && random.flag()) addend = random.numbers(size);
    if (random.flag()) live = random.bytes(size);
    for (uint8_t& flag : live) flag &= 1;
    for (float value : x) halves.push_back(static_cast<uint16_t>(to_bits(value) >> 16));
    source = {is_half ? static_cast<const void*>(halves.data()) : x.data(), is_half ? 2 : 4, size,
              addend.empty() ? nullptr : addend.data(), live.empty() ? nullptr : live.data()};
    for (int64_t i = 0; i < size; ++i) {
      float value = addend.empty() ? x[i] : x[i] + addend[i];
      keys.push_back(is_half ? halves[i] & kShortKeyMask : to_bits(value) & kKeyMask);
      if (!live.empty() && live[i] == 0) keys.back() = -1;
    }
  }
};

void select(const KeySource& source, int64_t count, Selected to) {
  if (source.size <= kBlockEntries) return select_short_row(source, count, to);
  LongRow row(source, count, to);
  row.start();
  for (int64_t i = 0; i < row.chunks(); ++i) row.split(i);
  if (row.chunks() > 0) row.finish();
  int64_t passes = 0;
  for (; row.is_open(); ++passes) {
    for (int64_t i = 0; i < row.chunks(); ++i) row.count(i);
    row.narrow();
  }
  require(passes <= 4, "a row takes more passes than its digits and its ties");
}

void fuzz_select(Random& random) {
  int64_t size = random.integer(1, random.flag() ? 70 : 3 * kBlockEntries);
  int64_t count = random.integer(0, size);
  Row row(random, size);
  uint32_t threshold, end;
  select(row.source, count, {&threshold, &end});
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return row.keys[a] > row.keys[b]; });
  for (int64_t rank = 0; rank < size; ++rank) {
    int64_t i = order[rank], key = row.keys[i];
    bool is_kept = key >= 0 && (key > threshold || (key == threshold && i < end));
    require(is_kept == (key >= 0 && rank < count), "an entry is kept or dropped wrongly");
  }
}

void fuzz_split(Random& random) {
  int64_t size = random.integer(0, 100);
  auto x = random.numbers(size, false), residual = random.numbers(size, false);
  bool has_residual = random.flag(), is_new = has_residual && random.flag();
  int32_t limit = static_cast<int32_t>(random.integer(-1, kKeyMask));
  std::vector<float> kept(size), dropped = residual;
  int64_t count = split_entries(x.data(), has_residual ? dropped.data() : nullptr, size, limit,
                                kept.data(), is_new ? dropped.data() : nullptr);
  for (int64_t i = 0; i < size; ++i) {
    float s = has_residual ? x[i] + residual[i] : x[i];
    bool is_kept = static_cast<int32_t>(to_bits(s) & kKeyMask) > limit;
    count -= is_kept;
    uint32_t left = to_bits(is_new ? (is_kept ? 0.0f : s) : residual[i]);
    require(to_bits(kept[i]) == to_bits(is_kept ? s : 0.0f), "a kept entry is wrong");
    require(to_bits(dropped[i]) == left, "a residual is wrong");
  }
  require(count == 0, "the count is wrong");
}

}  // namespace
}  // namespace sfpo

int main(int argc, char** argv) {
  int64_t inputs = argc > 1 ? std::atoll(argv[1]) : 5000;
  sfpo::Random random(argc > 2 ? std::atoll(argv[2]) : 0);
  for (int64_t i = 0; i < inputs; ++i) {
    sfpo::fuzz_select(random);
    sfpo::fuzz_split(random);
  }
  std::printf("fuzz_select: %lld inputs, nothing wrong\n", static_cast<long long>(inputs));
  return 0;
}
