// sfpo_sparsify on XLA's threads.
#include "operands/sparsify.h"

#include <atomic>
#include <cstring>

#include "core/select.h"
#include "cpu/parallel.h"
#include "cpu/sparsify_rows.h"

namespace sfpo {
namespace {

constexpr int64_t kChunkEntries = 1 << 16;

struct Span {
  int64_t leaf;
  int64_t start;
  int64_t size;
};

std::vector<Span> cut(const Views<const float>& leaves) {
  std::vector<Span> spans;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    for (int64_t start = 0; start < leaves[leaf].size; start += kChunkEntries) {
      int64_t size = std::min(kChunkEntries, leaves[leaf].size - start);
      spans.push_back({static_cast<int64_t>(leaf), start, size});
    }
  }
  return spans;
}

int64_t entries_of(const std::vector<Span>& spans) {
  int64_t sum = 0;
  for (const Span& span : spans) sum += span.size;
  return sum;
}

void copy(float* to, const float* from, int64_t count) {
  if (to != nullptr && to != from) std::memcpy(to, from, count * sizeof(float));
}

ffi::Error run(ffi::ThreadPool pool, const Sparsify& op) {
  std::vector<Span> spans = cut(op.x);
  std::vector<std::atomic<int64_t>> found(op.x.size());
  bool is_on = *op.is_on, is_new = is_on && *op.is_new;
  parallel_for(pool, spans.size(), entries_of(spans), [&](int64_t i) {
    int64_t leaf = spans[i].leaf, start = spans[i].start, size = spans[i].size;
    const float* x = op.x[leaf].data + start;
    const float* residual = at(op.residual, leaf, start);
    float* kept = op.kept[leaf].data + start;
    float* dropped = at(op.dropped, leaf, start);
    if (!is_new) copy(dropped, residual, size);
    if (!is_on) {
      found[leaf] += size;
      return copy(kept, x, size);
    }
    auto split = [&](int64_t first, int64_t stop, bool is_before_end) {
      found[leaf] +=
          split_entries(x + first, residual == nullptr ? nullptr : residual + first, stop - first,
                        limit_of(op.threshold[leaf], is_before_end), kept + first,
                        is_new && dropped != nullptr ? dropped + first : nullptr);
    };
    // Ties are kept before the end alone.
    int64_t ties = std::clamp<int64_t>(op.end[leaf] - start, 0, size);
    split(0, ties, true);
    split(ties, size, false);
  });
  for (size_t i = 0; i < found.size(); ++i) op.count[i] = static_cast<uint32_t>(found[i]);
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_sparsify, (sparsify<ffi::ThreadPool, run>),
                    sparsify_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
