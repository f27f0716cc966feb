// Random calls on pools of many shapes, against a model.
//
//     pool_properties [CALLS [SEEDS [DRIVER]]]    20,000 calls and 3 seeds if not given
//     pool_properties --full                      1,000,000 calls and 20 seeds
//
// With the file of tests/emulated/cuda_driver.cc for a driver, on the pages of a GPU.
#include "tests/pool_model.h"
#include "tests/pool_source.h"

namespace sfpo::pool {
namespace {

class Run {
 public:
  Run(const Source& source, uint64_t seed) : source_(source), seed_(seed), random_(seed) {
    const uint64_t pages[] = {4096, 16384, 65536};
    options_.page = pages[source.is_gpu() ? 2 : random_.integer(0, 2)];
    options_.limit = options_.page * static_cast<uint64_t>(random_.integer(20, 300));
    options_.cache =
        options_.page * static_cast<uint64_t>(random_.flag() ? random_.integer(0, 300) : 0);
    options_.poison = random_.flag();
    options_.compact_every = random_.flag() ? 500 : 0;
    auto pages_made = std::make_unique<FlakyPages>(source.make(), seed);
    unit_ = pages_made->alignment();
    flaky_ = pages_made.get();
    Code code = SFPO_POOL_OK;
    pool_ = Pool::make(std::move(pages_made), options_, &code);
    require(code == SFPO_POOL_OK, "no pool");
    // Each third run is of pages that refuse now and then.
    if (seed % 3 == 2) flaky_->refuse_one_of(is_flaky_ = 50);
  }

  void run(int64_t calls) {
    for (int64_t i = 0; i < calls; ++i) {
      step();
      if (i % 512 == 0) check_all();
    }
    end();
  }

 private:
  void step() {
    // Of two hundred calls; growing and shrinking in turns, so that the limit is met often.
    int64_t dice = random_.integer(0, 199);
    if (random_.integer(0, 499) == 0) is_growing_ = !is_growing_;
    if (dice < (is_growing_ ? 90 : 50)) return allocate();
    if (dice < 140) return free_one();
    if (dice < 150) return pin_or_unpin();
    if (dice < 165) return free_on_stream();
    if (dice < 180) return move_streams();
    if (dice < 184) return free_wrongly();
    if (dice < 186) return allocate_largest();
    if (dice == 186) return compact();
    if (dice == 187) require(is_fine(pool_->trim()), "a trim failed");
    if (dice == 188) require(is_fine(pool_->check()), "freed memory was written to");
    if (dice == 189) return write_after_free();
  }

  uint64_t size() {
    uint64_t page = options_.page;
    switch (random_.integer(0, 9)) {
      case 0:
        return page * static_cast<uint64_t>(random_.integer(1, 4));
      case 1:
        return static_cast<uint64_t>(random_.integer(1, static_cast<int64_t>(9 * page)));
      case 2:
        return static_cast<uint64_t>(random_.integer(1, static_cast<int64_t>(page)));
      default:
        return static_cast<uint64_t>(random_.integer(1, int64_t{1} << random_.integer(3, 11)));
    }
  }

  void allocate() {
    // Often of the size that was freed last, which has a shorter way.
    Block block{nullptr, 0, last_freed_ > 0 && random_.flag() ? last_freed_ : size(), ++next_seed_,
                0};
    uint64_t alignment = random_.integer(0, 3) ? 0 : uint64_t{1} << random_.integer(0, 12);
    bool is_movable = random_.integer(0, 2) == 0;
    bool asks = random_.integer(0, 3) == 0;
    uint64_t fits = asks ? numbers().largest_free : 0;
    Code code;
    void* address = nullptr;
    if (is_movable) {
      alignment = 0;
      code = pool_->allocate_movable(block.size, &block.handle);
      if (code == SFPO_POOL_OK) require(is_fine(pool_->pin(block.handle, &address)), "no pin");
    } else {
      code = pool_->allocate(block.size, alignment, &address);
    }
    if (code != SFPO_POOL_OK) {
      bool is_full =
          code == SFPO_POOL_OUT_OF_MEMORY && (!asks || block.size > fits || alignment > unit_);
      require(is_full || is_fine(code), "a block that fits was refused");
      return;
    }
    block.address = static_cast<char*>(address);
    require(reinterpret_cast<uint64_t>(address) % std::max<uint64_t>(alignment, unit_) == 0,
            "a block is not aligned");
    write_marks(block.address, block);
    if (is_movable) {
      require(is_fine(pool_->unpin(block.handle)), "no unpin");
      block.address = nullptr;
    }
    blocks_.push_back(block);
  }

  void free_one() {
    if (blocks_.empty()) return;
    Block block = take();
    if (block.handle == 0) {
      check_marks(block.address, block);
      require(is_fine(pool_->free(block.address)), "a free failed");
      last_freed_ = block.size;
      // Until something else begins there, a second free is refused.
      Code code = pool_->free(block.address);
      require(code == SFPO_POOL_DOUBLE_FREE, "a double free was taken");
      return;
    }
    if (block.pins > 0) {
      require(pool_->free_movable(block.handle) == SFPO_POOL_BUSY, "a pinned block was freed");
      while (block.pins-- > 0) require(is_fine(pool_->unpin(block.handle)), "no unpin");
    }
    check_movable(block);
    require(is_fine(pool_->free_movable(block.handle)), "a free failed");
    require(pool_->free_movable(block.handle) == SFPO_POOL_DOUBLE_FREE, "a double free was taken");
    void* address = nullptr;
    require(pool_->pin(block.handle, &address) == SFPO_POOL_DOUBLE_FREE, "a pin after a free");
  }

  Block take() {
    size_t i = static_cast<size_t>(random_.integer(0, static_cast<int64_t>(blocks_.size()) - 1));
    Block block = blocks_[i];
    blocks_[i] = blocks_.back();
    blocks_.pop_back();
    return block;
  }

  void pin_or_unpin() {
    if (blocks_.empty()) return;
    Block block = take();
    if (block.handle != 0 && block.pins == 0) {
      void* address = nullptr;
      require(is_fine(pool_->pin(block.handle, &address)), "no pin");
      block.address = static_cast<char*>(address);
      block.pins = 1;
    } else if (block.handle != 0) {
      require(is_fine(pool_->unpin(block.handle)), "no unpin");
      require(pool_->unpin(block.handle) == SFPO_POOL_INVALID, "an unpin without a pin");
      block.pins = 0;
    }
    blocks_.push_back(block);
  }

  void free_on_stream() {
    if (blocks_.empty()) return;
    Block block = take();
    void* stream = reinterpret_cast<void*>(random_.integer(0, 3));
    if (block.handle != 0) return blocks_.push_back(block);
    Code code = pool_->free_on_stream(block.address, stream);
    require(is_fine(code), "a free on a stream failed");
    if (code != SFPO_POOL_OK) return blocks_.push_back(block);
    code = pool_->free(block.address);
    require(code == SFPO_POOL_DOUBLE_FREE, "a double free was taken");
  }

  void move_streams() {
    void* stream = reinterpret_cast<void*>(random_.integer(0, 3));
    if (random_.flag()) {
      require(is_fine(source_.submit(*pool_, stream)), "no submit");
      ++ahead_[random_of(stream)];
    } else if (ahead_[random_of(stream)] > 0) {
      require(is_fine(source_.complete(*pool_, stream)), "no complete");
      --ahead_[random_of(stream)];
    }
  }

  static size_t random_of(void* stream) { return reinterpret_cast<size_t>(stream); }

  void free_wrongly() {
    char on_stack = 0;
    require(pool_->free(&on_stack) == SFPO_POOL_FOREIGN, "a foreign address was freed");
    require(pool_->free(nullptr) == SFPO_POOL_FOREIGN, "a null address was freed");
    void* address = nullptr;
    require(pool_->pin(~uint64_t{0}, &address) == SFPO_POOL_FOREIGN, "a foreign handle");
    require(pool_->pin(0, &address) == SFPO_POOL_FOREIGN, "a null handle");
    for (const Block& block : blocks_) {
      if (block.handle != 0) continue;
      require(pool_->free(block.address + 1) == SFPO_POOL_DOUBLE_FREE, "half a block was freed");
      return;
    }
  }

  // The promise of no fragmentation above a page: as much as is free can be had in one block.
  void allocate_largest() {
    sfpo_pool_statistics before = numbers();
    uint64_t pages_free = before.limit - (before.mapped - before.cached);
    require(before.largest_free >= pages_free, "free pages are scattered");
    if (before.largest_free == 0) return;
    void* address = nullptr;
    Code code = pool_->allocate(before.largest_free, 0, &address);
    require(is_fine(code), "the largest block cannot be had");
    if (code != SFPO_POOL_OK) return;
    static_cast<char*>(address)[0] = static_cast<char*>(address)[before.largest_free - 1] = 1;
    require(is_fine(pool_->free(address)), "a free failed");
    code = pool_->allocate(before.largest_free + unit_, 0, &address);
    // What moves may have made room for more.
    if (code == SFPO_POOL_OK) {
      require(numbers().compactions > before.compactions, "more than the largest was had");
      require(is_fine(pool_->free(address)), "a free failed");
    }
  }

  void compact() {
    uint64_t given_back = 0;
    sfpo_pool_statistics before = numbers();
    require(is_fine(pool_->compact(&given_back)), "a compaction failed");
    sfpo_pool_statistics after = numbers();
    require(after.in_use == before.in_use && after.blocks == before.blocks, "blocks were lost");
    require(after.mapped - after.cached + given_back == before.mapped - before.cached,
            "what was given back is not so");
  }

  void write_after_free() {
    if (!options_.poison || is_flaky_) return;
    void* first = nullptr;
    void* second = nullptr;
    // Its neighbour keeps the page mapped.
    if (pool_->allocate(64, 0, &first) != SFPO_POOL_OK) return;
    if (pool_->allocate(64, 0, &second) == SFPO_POOL_OK) {
      uint64_t found = numbers().damaged;
      require(is_fine(pool_->free(first)), "a free failed");
      if (reinterpret_cast<uint64_t>(first) / options_.page ==
          reinterpret_cast<uint64_t>(second) / options_.page) {
        static_cast<char*>(first)[17] = 1;
        require(pool_->check() == SFPO_POOL_DAMAGED, "a write after a free is not seen");
        require(numbers().damaged == found + 1, "damage is not counted");
      }
      first = second;
    }
    require(is_fine(pool_->free(first)), "a free failed");
    require(is_fine(pool_->check()), "damage was not mended");
  }

  void check_movable(const Block& block) {
    void* address = nullptr;
    require(is_fine(pool_->pin(block.handle, &address)), "no pin");
    if (block.pins > 0) require(address == block.address, "a pinned block was moved");
    check_marks(static_cast<char*>(address), block);
    require(is_fine(pool_->unpin(block.handle)), "no unpin");
  }

  void check_all() {
    uint64_t requested = 0, rounded = 0;
    std::vector<std::pair<char*, uint64_t>> places;
    for (const Block& block : blocks_) {
      void* address = block.address;
      if (block.handle != 0) {
        check_movable(block);
        pool_->pin(block.handle, &address);
        pool_->unpin(block.handle);
      } else {
        check_marks(block.address, block);
      }
      requested += block.size;
      rounded += (block.size + unit_ - 1) / unit_ * unit_;
      places.emplace_back(static_cast<char*>(address), block.size);
    }
    std::sort(places.begin(), places.end());
    for (size_t i = 1; i < places.size(); ++i) {
      require(places[i - 1].first + places[i - 1].second <= places[i].first, "blocks overlap");
    }
    sfpo_pool_statistics now = numbers();
    require(now.in_use == rounded + now.waiting && now.requested >= requested, "bytes are lost");
    require(now.mapped >= now.in_use && now.mapped <= now.limit, "mapped is not so");
    require(now.cached <= std::min(options_.cache, options_.limit) || is_flaky_,
            "more is cached than allowed");
    require(now.free + now.in_use == now.limit && now.largest_free <= now.free, "free is not so");
  }

  // All is freed; nothing remains.
  void end() {
    is_flaky_ = 0;
    flaky_->refuse_one_of(0);
    while (!blocks_.empty()) free_one();
    for (size_t i = 0; i < 4; ++i) {
      while (ahead_[i]-- > 0) source_.complete(*pool_, reinterpret_cast<void*>(i));
    }
    require(pool_->wait() == SFPO_POOL_OK, "a block still waits");
    check_all();
    require(pool_->check() == SFPO_POOL_OK, "freed memory was written to");
    require(pool_->trim() == SFPO_POOL_OK, "a trim failed");
    sfpo_pool_statistics now = numbers();
    require(now.in_use == 0 && now.blocks == 0 && now.requested == 0 && now.waiting == 0,
            "something is still in use");
    require(now.mapped == 0, "pages are still mapped");
    require(now.pages_given_back == now.pages_mapped, "pages were lost");
    require(now.largest_free == now.limit, "not all is free");
    require(pool_->may_end() == SFPO_POOL_OK, "the pool may not end");
    std::printf(
        "seed %llu: %llu blocks, %llu pages mapped, %llu moved, %llu compactions moved %s\n",
        (unsigned long long)seed_, (unsigned long long)now.allocations,
        (unsigned long long)now.pages_mapped, (unsigned long long)now.pages_moved,
        (unsigned long long)now.compactions, in_words(now.moved).c_str());
  }

  sfpo_pool_statistics numbers() {
    sfpo_pool_statistics found;
    require(is_fine(pool_->statistics(&found)), "no statistics");
    return found;
  }

  // A refusal is fine where the test asks for refusals.
  bool is_fine(Code code) const {
    return code == SFPO_POOL_OK || (is_flaky_ && code == SFPO_POOL_SYSTEM);
  }

  const Source& source_;
  uint64_t seed_;
  uint64_t unit_ = 0;
  Random random_;
  sfpo_pool_options options_{};
  FlakyPages* flaky_;
  std::unique_ptr<Pool> pool_;
  std::vector<Block> blocks_;
  uint64_t next_seed_ = 0;
  uint64_t last_freed_ = 0;
  int64_t ahead_[4] = {};
  int64_t is_flaky_ = 0;
  bool is_growing_ = true;
};

}  // namespace
}  // namespace sfpo::pool

int main(int count, char** words) {
  bool is_full = count > 1 && std::string(words[1]) == "--full";
  long calls = is_full ? 1000000 : count > 1 ? std::atol(words[1]) : 20000;
  long seeds = is_full ? 20 : count > 2 ? std::atol(words[2]) : 3;
  if (calls < 1 || seeds < 1) {
    std::fprintf(stderr, "error: pool_properties [CALLS [SEEDS]] or pool_properties --full\n");
    return 2;
  }
  sfpo::pool::Source source(count > 3 ? words[3] : nullptr);
  for (long seed = 0; seed < seeds; ++seed) {
    sfpo::pool::Run(source, static_cast<uint64_t>(seed)).run(calls);
    sfpo::pool::require(source.in_use() == 0, "the GPU has lost pages");
  }
  std::printf("pool_properties: nothing wrong in %ld calls for each of %ld seeds\n", calls, seeds);
  return 0;
}
