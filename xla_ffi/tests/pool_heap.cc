// The heap's own order, looked at after every change: tiles without gaps, holes that are joined,
// no page that nothing lies in.
#include <map>

#include "memory_pool/heap.h"
#include "tests/pool_model.h"

namespace sfpo::pool {
namespace {

constexpr uint64_t kPage = 4096;

void check_tile(Heap& heap, uint32_t id) {
  const Tile& tile = heap.tiles()[id];
  require(tile.size > 0 && tile.size % heap.unit() == 0, "a tile of an odd size");
  if (tile.before == kNone) {
    require(tile.offset % kPage == 0, "a run begins inside of a page");
  } else {
    const Tile& before = heap.tiles()[tile.before];
    require(before.after == id && before.end() == tile.offset, "neighbours that are none");
    require(tile.kind != Kind::hole || before.kind != Kind::hole, "two holes side by side");
  }
  if (tile.after == kNone) {
    require(tile.end() % kPage == 0, "a run ends inside of a page");
  } else {
    require(heap.tiles()[tile.after].before == id, "neighbours that are none");
  }
  if (tile.kind != Kind::hole) return;
  uint64_t first = (tile.offset + kPage - 1) / kPage * kPage;
  require(first + kPage > tile.end(), "a page that nothing lies in");
  require(tile.bin != kNone && tile.is_last == (tile.after == kNone), "a hole in a wrong place");
}

void check_heap(Heap& heap, const std::map<uint64_t, uint32_t>& blocks) {
  uint64_t all = 0, alive = 0;
  for (uint32_t id = 0; id < heap.tiles().size(); ++id) {
    if (heap.tiles()[id].kind == Kind::spare) continue;
    check_tile(heap, id);
    all += heap.tiles()[id].size;
    alive += heap.tiles()[id].kind == Kind::live;
  }
  require(all == heap.map().used() * kPage, "pages are lost");
  require(alive == blocks.size() && alive == heap.blocks(), "blocks are lost");
}

void run(uint64_t seed) {
  Random random(seed);
  HostPages pages;
  Heap heap(pages, kPage, 60, static_cast<uint32_t>(random.integer(0, 20)), std::nullopt);
  require(heap.reserve() == SFPO_POOL_OK, "no addresses");
  std::map<uint64_t, uint32_t> blocks;
  for (int i = 0; i < 4000; ++i) {
    if (random.integer(0, 99) < 52) {
      // Multiples of a quarter of a page, so that blocks often end where pages do.
      uint64_t size = kPage / 4 * static_cast<uint64_t>(random.integer(1, 14));
      if (random.integer(0, 2) == 0) size = 64 * static_cast<uint64_t>(random.integer(1, 100));
      uint32_t id = kNone;
      if (heap.place(size, 64, &id) != SFPO_POOL_OK) continue;
      require(heap.tiles()[id].size == size, "a block of another size");
      blocks[heap.tiles()[id].offset] = id;
    } else if (!blocks.empty()) {
      auto one = blocks.begin();
      std::advance(one, random.integer(0, static_cast<int64_t>(blocks.size()) - 1));
      heap.release(one->second);
      blocks.erase(one);
    }
    check_heap(heap, blocks);
  }
  while (!blocks.empty()) {
    heap.release(blocks.begin()->second);
    blocks.erase(blocks.begin());
    check_heap(heap, blocks);
  }
  require(heap.map().used() == 0, "pages are still in use");
}

}  // namespace
}  // namespace sfpo::pool

int main() {
  for (uint64_t seed = 0; seed < 10; ++seed) sfpo::pool::run(seed);
  std::puts("pool_heap: nothing wrong");
  return 0;
}
