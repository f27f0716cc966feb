// Fragmentation on a trace like that of a training program: staging buffers of a transformer's
// leaves, which come and go with checkpoints, between small workspaces that live long.
//
//     pool_trace    prints a line of JSON; fails where a compaction leaves less than 0.8 of what
//                   is free for one block
#include "tests/pool_model.h"

namespace sfpo::pool {
namespace {

constexpr uint64_t kPage = 2 << 20;
constexpr double kLeast = 0.8;

struct Event {
  uint64_t block;  // allocated where it is seen first, freed where it is seen again
  uint64_t size;
};

// Leaves of a GPT-2's layer, of 768 features and float32, and of its moments in one byte.
uint64_t leaf_size(Random& random) {
  const uint64_t leaves[] = {768, 768 * 2304, 2304, 768 * 768, 768 * 3072, 3072};
  return leaves[random.integer(0, 5)] * (random.flag() ? 4 : 1);
}

// From 64 bytes to 1 MiB, small ones more often.
uint64_t workspace_size(Random& random) {
  uint64_t size = uint64_t{64} << std::min(random.integer(0, 13), random.integer(0, 13));
  return size + random.bits() % size;
}

// Recorded once, so that every pool sees the same.
std::vector<Event> record(uint64_t seed, int events) {
  Random random(seed);
  std::vector<Event> trace, staged, kept;
  uint64_t blocks = 0;
  for (int i = 0; i < events; ++i) {
    // Waves: a checkpoint stages up to 60 leaves, and lets go of them in another order.
    bool is_staging = i / 120 % 2 == 0;
    std::vector<Event>& alive = random.integer(0, 3) == 0 ? kept : staged;
    bool frees = &alive == &staged ? !is_staging : random.integer(0, 9) < 5;
    if (frees && !alive.empty()) {
      size_t one = static_cast<size_t>(random.integer(0, static_cast<int64_t>(alive.size()) - 1));
      trace.push_back(alive[one]);
      alive[one] = alive.back();
      alive.pop_back();
    } else {
      alive.push_back({++blocks, &alive == &kept ? workspace_size(random) : leaf_size(random)});
      trace.push_back(alive.back());
    }
  }
  return trace;
}

uint64_t most_in_use(const std::vector<Event>& trace) {
  std::vector<bool> is_alive(trace.size() + 1);
  uint64_t now = 0, most = 0;
  for (const Event& event : trace) {
    uint64_t size = (event.size + 63) / 64 * 64;
    is_alive[event.block] = !is_alive[event.block];
    now += is_alive[event.block] ? size : -size;
    most = std::max(most, now);
  }
  return most;
}

void run(uint64_t seed) {
  std::vector<Event> trace = record(seed, 12000);
  sfpo_pool_options options{};
  options.page = kPage;
  // A tenth more than what is in use at the worst moment.
  uint64_t most = most_in_use(trace);
  options.limit = (most + most / 10) / kPage * kPage;
  options.cache = 64 << 20;
  Code code = SFPO_POOL_OK;
  auto pool = Pool::make(std::make_unique<HostPages>(), options, &code);
  require(code == SFPO_POOL_OK, "no pool");
  std::vector<sfpo_pool_handle> handles(trace.size() + 1, 0);
  double least_before = 1, least_after = 1;
  uint64_t refused = 0;
  sfpo_pool_statistics now;
  for (size_t i = 0; i < trace.size(); ++i) {
    sfpo_pool_handle& handle = handles[trace[i].block];
    void* address = nullptr;
    // A twentieth is in use by somebody, and stays where it is.
    bool is_pinned = trace[i].block % 20 == 0;
    if (handle != 0) {
      if (is_pinned) require(pool->unpin(handle) == SFPO_POOL_OK, "no unpin");
      require(pool->free_movable(handle) == SFPO_POOL_OK, "no free");
      handle = 0;
    } else if (pool->allocate_movable(trace[i].size, &handle) != SFPO_POOL_OK) {
      ++refused;
    } else if (is_pinned) {
      require(pool->pin(handle, &address) == SFPO_POOL_OK, "no pin");
    }
    if (i % 500 != 499) continue;
    require(pool->statistics(&now) == SFPO_POOL_OK, "no statistics");
    least_before = std::min(least_before, double(now.largest_free) / double(now.free));
    uint64_t given_back = 0;
    require(pool->compact(&given_back) == SFPO_POOL_OK, "no compaction");
    require(pool->statistics(&now) == SFPO_POOL_OK, "no statistics");
    least_after = std::min(least_after, double(now.largest_free) / double(now.free));
  }
  std::printf(
      "{\"seed\": %llu, \"events\": %zu, \"limit\": %llu, \"peak_in_use\": %llu, "
      "\"peak_mapped\": %llu, \"refused\": %llu, \"least_before\": %.4f, "
      "\"least_after\": %.4f, \"moved\": %llu}\n",
      (unsigned long long)seed, trace.size(), (unsigned long long)options.limit,
      (unsigned long long)now.peak_in_use, (unsigned long long)now.peak_mapped,
      (unsigned long long)refused, least_before, least_after, (unsigned long long)now.moved);
  require(least_after >= kLeast, "what is free lies scattered after a compaction");
}

}  // namespace
}  // namespace sfpo::pool

int main() {
  for (uint64_t seed = 0; seed < 3; ++seed) sfpo::pool::run(seed);
  return 0;
}
