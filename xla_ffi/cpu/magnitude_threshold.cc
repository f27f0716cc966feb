// sfpo_magnitude_threshold on XLA's threads.
#include "operands/magnitude_threshold.h"

#include <deque>

#include "cpu/parallel.h"
#include "cpu/select_row.h"

namespace sfpo {
namespace {

constexpr int64_t kChunkEntries = 1 << 16;

// Some short rows of one array.
struct ShortRows {
  KeySource first;
  int64_t rows;
  const uint32_t* count;
  Selected to;

  void select() const {
    for (int64_t i = 0; i < rows; ++i) {
      select_short_row(first.from(i * first.size), count[i], {to.threshold + i, to.end + i});
    }
  }
};

// What there is to do, cut into pieces of about one size.
struct Work {
  std::deque<LongRow> long_rows;  // they cannot be moved
  std::vector<std::vector<ShortRows>> short_rows;
  int64_t entries = 0;

  void add(const KeySource& first, int64_t rows, const uint32_t* count, Selected to) {
    int64_t width = first.size;
    for (int64_t row = 0, step; row < rows; row += step) {
      KeySource source = first.from(row * width);
      Selected row_to{to.threshold + row, to.end + row};
      step = 1;
      if (width > kBlockEntries) {
        long_rows.emplace_back(source, count[row], row_to);
      } else {
        if (open_ <= 0) {
          short_rows.emplace_back();
          open_ = kChunkEntries;
        }
        // An empty row costs something, too.
        int64_t cost = std::max<int64_t>(width, 16);
        step = std::clamp<int64_t>(open_ / cost, 1, rows - row);
        short_rows.back().push_back({source, step, count + row, row_to});
        open_ -= step * cost;
      }
    }
    entries += rows * width;
  }

 private:
  int64_t open_ = 0;  // room in the last of `short_rows`
};

void select_all(ffi::ThreadPool& pool, Work& work) {
  auto each = [&](int64_t count, const auto& body) {
    if (work.entries > kChunkEntries) return parallel_for(pool, count, work.entries, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  };
  std::deque<LongRow>& rows = work.long_rows;
  int64_t count = rows.size();
  each(count + work.short_rows.size(), [&](int64_t i) {
    if (i < count) return rows[i].start();
    for (const ShortRows& some : work.short_rows[i - count]) some.select();
  });
  std::vector<std::pair<LongRow*, int64_t>> chunks;
  std::vector<LongRow*> undecided;
  for (LongRow& row : rows) {
    for (int64_t i = 0; i < row.chunks(); ++i) chunks.emplace_back(&row, i);
    if (row.chunks() > 0) undecided.push_back(&row);
  }
  each(chunks.size(), [&](int64_t i) { chunks[i].first->split(chunks[i].second); });
  each(undecided.size(), [&](int64_t i) { undecided[i]->finish(); });
  for (LongRow* row : undecided) {
    while (row->is_open()) {
      each(row->chunks(), [&](int64_t i) { row->count(i); });
      row->narrow();
    }
  }
}

ffi::Error run(ffi::ThreadPool pool, const MagnitudeThreshold& op) {
  Work work;
  const uint32_t* count = op.count;
  Selected to{op.threshold, op.end};
  for (size_t i = 0; i < op.x.size(); ++i) {
    int64_t rows = op.rows[i];
    if (rows == 0) continue;
    int64_t item = op.x[i].dtype == ffi::F32 ? 4 : 2;
    const bool* live = at(op.live, i, 0);
    work.add({op.x[i].data, item, op.x[i].size / rows, at(op.addend, i, 0),
              reinterpret_cast<const uint8_t*>(live)},
             rows, count, to);
    count += rows;
    to = {to.threshold + rows, to.end + rows};
  }
  select_all(pool, work);
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_magnitude_threshold, (magnitude_threshold<ffi::ThreadPool, run>),
                    magnitude_threshold_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
