// The C interface, and what each wrong call comes back with: a code and one line, and no harm.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory_pool/sfpo_pool.h"

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "pool_errors: %s (last message: %s)\n", what, sfpo_pool_last_message());
  std::abort();
}

// The call failed in this way, and said a line with these words.
void fails(int code, int wanted, const char* words) {
  require(code == wanted, words);
  const char* line = sfpo_pool_last_message();
  require(std::strstr(line, words) != nullptr && std::strchr(line, '\n') == nullptr, words);
}

sfpo_pool_options small() {
  sfpo_pool_options options;
  sfpo_pool_default_options(&options);
  options.page = 65536;
  options.limit = 16 * options.page;
  options.cache = 0;
  return options;
}

sfpo_pool* make(const sfpo_pool_options& options) {
  sfpo_pool* pool = nullptr;
  require(sfpo_pool_create(&options, &pool) == SFPO_POOL_OK && pool != nullptr, "no pool");
  return pool;
}

void* allocate(sfpo_pool* pool, uint64_t size) {
  void* block = nullptr;
  require(sfpo_pool_allocate(pool, size, 0, &block) == SFPO_POOL_OK && block, "no block");
  return block;
}

sfpo_pool_statistics numbers(sfpo_pool* pool) {
  sfpo_pool_statistics found;
  require(sfpo_pool_get_statistics(pool, &found) == SFPO_POOL_OK, "no statistics");
  return found;
}

void check_options() {
  sfpo_pool* pool = nullptr;
  sfpo_pool_options options = small();
  fails(sfpo_pool_create(nullptr, &pool), SFPO_POOL_INVALID, "null");
  fails(sfpo_pool_create(&options, nullptr), SFPO_POOL_INVALID, "null");
  options.page = 100000;
  fails(sfpo_pool_create(&options, &pool), SFPO_POOL_INVALID, "power of two");
  options.page = 1024;
  fails(sfpo_pool_create(&options, &pool), SFPO_POOL_INVALID, "multiple of the system's");
  options.page = 1 << 20;
  options.limit = 1000;
  fails(sfpo_pool_create(&options, &pool), SFPO_POOL_INVALID, "at least a page");
  options.limit = uint64_t{1} << 60;
  fails(sfpo_pool_create(&options, &pool), SFPO_POOL_INVALID, "2^26 pages");
  options.backend = 7;
  fails(sfpo_pool_create(&options, &pool), SFPO_POOL_INVALID, "`backend`");
  require(pool == nullptr, "a pool of wrong options");
  fails(sfpo_pool_destroy(nullptr), SFPO_POOL_INVALID, "null");
}

void check_blocks() {
  sfpo_pool* pool = make(small());
  void* block = nullptr;
  fails(sfpo_pool_allocate(pool, 0, 0, &block), SFPO_POOL_INVALID, "at least 1 byte");
  fails(sfpo_pool_allocate(pool, 1, 3, &block), SFPO_POOL_INVALID, "`alignment`");
  fails(sfpo_pool_allocate(pool, 1, 1 << 20, &block), SFPO_POOL_INVALID, "`alignment`");
  fails(sfpo_pool_allocate(pool, 1, 0, nullptr), SFPO_POOL_INVALID, "null");
  fails(sfpo_pool_allocate(nullptr, 1, 0, &block), SFPO_POOL_INVALID, "null");
  fails(sfpo_pool_allocate(pool, ~uint64_t{0}, 0, &block), SFPO_POOL_OUT_OF_MEMORY, "never");
  char* first = static_cast<char*>(allocate(pool, 15 * 65536));
  fails(sfpo_pool_allocate(pool, 65537, 0, &block), SFPO_POOL_OUT_OF_MEMORY,
        "largest block that can be had is 64 KiB");
  fails(sfpo_pool_free(pool, first + 64), SFPO_POOL_DOUBLE_FREE, "no block begins at");
  fails(sfpo_pool_free(pool, &block), SFPO_POOL_FOREIGN, "not an address of this pool");
  fails(sfpo_pool_free(pool, nullptr), SFPO_POOL_FOREIGN, "not an address of this pool");
  fails(sfpo_pool_destroy(pool), SFPO_POOL_BUSY, "1 blocks of 960 KiB are still alive");
  first[0] = first[15 * 65536 - 1] = 1;
  require(numbers(pool).mapped == 15 * 65536, "not lazy");
  require(sfpo_pool_free(pool, first) == SFPO_POOL_OK, "no free");
  require(numbers(pool).mapped == 0, "a release that is not immediate");
  fails(sfpo_pool_free(pool, first), SFPO_POOL_DOUBLE_FREE, "freed before");
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

// The block freed last is kept whole for a moment: nobody may see it.
void check_kept() {
  sfpo_pool_options options = small();
  options.cache = 4 * options.page;
  sfpo_pool* pool = make(options);
  void* block = allocate(pool, 70000);
  require(sfpo_pool_free(pool, block) == SFPO_POOL_OK, "no free");
  fails(sfpo_pool_free(pool, block), SFPO_POOL_DOUBLE_FREE, "freed before");
  require(numbers(pool).in_use == 0 && numbers(pool).mapped == 2 * options.page, "kept is seen");
  require(allocate(pool, 70000) == block, "not the cached pages");
  require(sfpo_pool_free(pool, block) == SFPO_POOL_OK, "no free");
  // All of the limit, that block's pages included.
  require(sfpo_pool_free(pool, allocate(pool, options.limit)) == SFPO_POOL_OK, "no free");
  require(numbers(pool).mapped == options.cache, "more is cached than allowed");
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

// Free pages between blocks make one large block.
void check_scattered() {
  sfpo_pool_options options = small();
  options.cache = options.limit;
  sfpo_pool* pool = make(options);
  void* blocks[16];
  for (void*& block : blocks) block = allocate(pool, options.page);
  for (int i = 0; i < 16; i += 2) require(sfpo_pool_free(pool, blocks[i]) == 0, "no free");
  require(numbers(pool).largest_free == 8 * options.page, "free pages are scattered");
  char* large = static_cast<char*>(allocate(pool, 8 * options.page));
  std::memset(large, 1, 8 * options.page);
  require(numbers(pool).pages_moved > 0 && numbers(pool).mapped == options.limit, "not moved");
  require(sfpo_pool_free(pool, large) == SFPO_POOL_OK, "no free");
  for (int i = 1; i < 16; i += 2) require(sfpo_pool_free(pool, blocks[i]) == 0, "no free");
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

void check_movable() {
  sfpo_pool* pool = make(small());
  sfpo_pool_handle handles[8];
  void* address = nullptr;
  // Two to a page; one of each page goes.
  for (auto& handle : handles) {
    require(sfpo_pool_allocate_movable(pool, 30000, &handle) == SFPO_POOL_OK, "no block");
    require(sfpo_pool_pin(pool, handle, &address) == SFPO_POOL_OK, "no pin");
    std::memset(address, static_cast<int>(&handle - handles), 30000);
    require(sfpo_pool_unpin(pool, handle) == SFPO_POOL_OK, "no unpin");
  }
  for (int i = 0; i < 8; i += 2) require(sfpo_pool_free_movable(pool, handles[i]) == 0, "no free");
  fails(sfpo_pool_free_movable(pool, handles[0]), SFPO_POOL_DOUBLE_FREE, "freed before");
  fails(sfpo_pool_unpin(pool, handles[1]), SFPO_POOL_INVALID, "not pinned");
  fails(sfpo_pool_pin(pool, 99, &address), SFPO_POOL_FOREIGN, "not of this pool");
  void* pinned = nullptr;
  require(sfpo_pool_pin(pool, handles[1], &pinned) == SFPO_POOL_OK, "no pin");
  fails(sfpo_pool_free_movable(pool, handles[1]), SFPO_POOL_BUSY, "pinned 1 times");
  uint64_t given_back = 0;
  require(sfpo_pool_compact(pool, &given_back) == SFPO_POOL_OK, "no compaction");
  require(given_back == 2 * 65536 && numbers(pool).mapped == 2 * 65536, "not compact");
  require(sfpo_pool_pin(pool, handles[1], &address) == SFPO_POOL_OK, "no pin");
  require(address == pinned, "a pinned block was moved");
  for (int i = 0; i < 2; ++i) require(sfpo_pool_unpin(pool, handles[1]) == 0, "no unpin");
  for (int i = 1; i < 8; i += 2) {
    require(sfpo_pool_pin(pool, handles[i], &address) == SFPO_POOL_OK, "no pin");
    const char* bytes = static_cast<const char*>(address);
    for (int k = 0; k < 30000; ++k) require(bytes[k] == i, "a moved block lost its bytes");
    require(sfpo_pool_unpin(pool, handles[i]) == SFPO_POOL_OK, "no unpin");
    require(sfpo_pool_free_movable(pool, handles[i]) == SFPO_POOL_OK, "no free");
  }
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

void check_streams() {
  sfpo_pool* pool = make(small());
  int a = 0, b = 0;
  void* first = allocate(pool, 16 * 65536);
  require(sfpo_pool_stream_submit(pool, &a) == SFPO_POOL_OK, "no submit");
  require(sfpo_pool_free_on_stream(pool, first, &a) == SFPO_POOL_OK, "no free");
  // Work given to the stream later, and other streams, change nothing.
  require(sfpo_pool_stream_submit(pool, &a) == SFPO_POOL_OK, "no submit");
  fails(sfpo_pool_stream_complete(pool, &b), SFPO_POOL_INVALID, "nothing to complete");
  require(numbers(pool).waiting == 16 * 65536, "a free came too early");
  void* second = nullptr;
  fails(sfpo_pool_allocate(pool, 64, 0, &second), SFPO_POOL_OUT_OF_MEMORY, "waiting for streams");
  fails(sfpo_pool_free(pool, first), SFPO_POOL_DOUBLE_FREE, "on a stream");
  fails(sfpo_pool_wait(pool), SFPO_POOL_BUSY, "not complete");
  fails(sfpo_pool_destroy(pool), SFPO_POOL_BUSY, "still alive");
  require(sfpo_pool_stream_complete(pool, &a) == SFPO_POOL_OK, "no complete");
  require(numbers(pool).waiting == 0 && numbers(pool).mapped == 0, "a free did not come");
  require(sfpo_pool_free(pool, allocate(pool, 64)) == SFPO_POOL_OK, "no free");
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

void check_poison() {
  sfpo_pool_options options = small();
  options.poison = 1;
  options.cache = options.limit;
  sfpo_pool* pool = make(options);
  char* block = static_cast<char*>(allocate(pool, 1000));
  void* neighbour = allocate(pool, 1000);
  require(sfpo_pool_free(pool, block) == SFPO_POOL_OK, "no free");
  block[999] = 0;
  void* next = nullptr;
  fails(sfpo_pool_allocate(pool, 1000, 0, &next), SFPO_POOL_DAMAGED, "was written to after");
  require(numbers(pool).damaged == 1, "damage is not counted");
  // Said once; the memory is good again.
  require(sfpo_pool_free(pool, allocate(pool, 1000)) == SFPO_POOL_OK, "no free");
  require(sfpo_pool_free(pool, neighbour) == SFPO_POOL_OK, "no free");
  block[5] = 1;  // the page is cached, and still there
  fails(sfpo_pool_check(pool), SFPO_POOL_DAMAGED, "was written to after");
  block[5] = 1;
  require(sfpo_pool_trim(pool) == SFPO_POOL_OK && numbers(pool).damaged == 3, "lost unseen");
  require(sfpo_pool_destroy(pool) == SFPO_POOL_OK, "no end");
}

}  // namespace

int main() {
  require(sfpo_pool_version() == SFPO_POOL_VERSION, "another version");
  check_options();
  check_blocks();
  check_kept();
  check_scattered();
  check_movable();
  check_streams();
  check_poison();
  std::puts("pool_errors: nothing wrong");
  return 0;
}
