// The C interface: null pointers and exceptions become codes here.
#include <exception>
#include <memory>

#include "memory_pool/host_pages.h"
#include "memory_pool/pool.h"
#ifdef SFPO_POOL_HAS_CUDA
#include "memory_pool/cuda_pages.h"
#endif

struct sfpo_pool {
  std::unique_ptr<sfpo::pool::Pool> pool;
};

namespace sfpo::pool {
namespace {

template <typename Call>
int guarded(Call call) noexcept {
  try {
    try {
      return call();
    } catch (const std::bad_alloc&) {
      return fail(SFPO_POOL_OUT_OF_MEMORY, "no memory is left for the pool's own tables");
    } catch (const std::exception& error) {
      return fail(SFPO_POOL_SYSTEM, "%s", error.what());
    }
  } catch (...) {
    return SFPO_POOL_OUT_OF_MEMORY;  // without a line: there was no memory for that either
  }
}

// Calls `call` with the pool, unless the pool or another of the pointers is null.
template <typename Call, typename... Pointers>
int with(sfpo_pool* pool, Call call, Pointers... pointers) noexcept {
  return guarded([&]() -> Code {
    if (pool == nullptr || (... || (pointers == nullptr))) {
      return fail(SFPO_POOL_INVALID, "a pointer that the call needs is null");
    }
    return call(*pool->pool);
  });
}

Code make_pages(const sfpo_pool_options& options, std::unique_ptr<Pages>* pages) {
  if (options.backend == SFPO_POOL_HOST) {
    *pages = std::make_unique<HostPages>();
    return SFPO_POOL_OK;
  }
  if (options.backend != SFPO_POOL_CUDA) {
    return fail(SFPO_POOL_INVALID, "`backend` must be 0 (host) or 1 (CUDA), got %d",
                options.backend);
  }
#ifdef SFPO_POOL_HAS_CUDA
  return CudaPages::make(options.driver, options.device, pages);
#else
  return fail(SFPO_POOL_UNAVAILABLE, "the library was built without CUDA's headers");
#endif
}

}  // namespace
}  // namespace sfpo::pool

using sfpo::pool::Code;
using sfpo::pool::fail;
using sfpo::pool::Pool;
using sfpo::pool::with;

extern "C" {

int sfpo_pool_version(void) { return SFPO_POOL_VERSION; }

const char* sfpo_pool_last_message(void) { return sfpo::pool::last_message().c_str(); }

void sfpo_pool_default_options(sfpo_pool_options* options) {
  if (options == nullptr) return;
  *options = sfpo_pool_options{};
  options->limit = uint64_t{1} << 30;
  options->page = uint64_t{2} << 20;
  options->cache = uint64_t{64} << 20;
}

int sfpo_pool_probe(const sfpo_pool_options* options) {
  return sfpo::pool::guarded([&]() -> Code {
    if (options == nullptr) return fail(SFPO_POOL_INVALID, "the options are null");
    std::unique_ptr<sfpo::pool::Pages> pages;
    return sfpo::pool::make_pages(*options, &pages);
  });
}

int sfpo_pool_create(const sfpo_pool_options* options, sfpo_pool** pool) {
  return sfpo::pool::guarded([&]() -> Code {
    if (options == nullptr || pool == nullptr) {
      return fail(SFPO_POOL_INVALID, "a pointer that the call needs is null");
    }
    *pool = nullptr;
    std::unique_ptr<sfpo::pool::Pages> pages;
    if (Code code = sfpo::pool::make_pages(*options, &pages)) return code;
    Code code = SFPO_POOL_OK;
    auto made = std::make_unique<sfpo_pool>();
    made->pool = Pool::make(std::move(pages), *options, &code);
    if (code == SFPO_POOL_OK) *pool = made.release();
    return code;
  });
}

int sfpo_pool_destroy(sfpo_pool* pool) {
  int code = with(pool, [](Pool& one) { return one.may_end(); });
  if (code == SFPO_POOL_OK) delete pool;
  return code;
}

int sfpo_pool_allocate(sfpo_pool* pool, uint64_t size, uint64_t alignment, void** block) {
  return with(pool, [=](Pool& one) { return one.allocate(size, alignment, block); }, block);
}

int sfpo_pool_free(sfpo_pool* pool, void* block) {
  return with(pool, [=](Pool& one) { return one.free(block); });
}

int sfpo_pool_free_on_stream(sfpo_pool* pool, void* block, void* stream) {
  return with(pool, [=](Pool& one) { return one.free_on_stream(block, stream); });
}

int sfpo_pool_stream_submit(sfpo_pool* pool, void* stream) {
  return with(pool, [=](Pool& one) { return one.submit(stream); });
}

int sfpo_pool_stream_complete(sfpo_pool* pool, void* stream) {
  return with(pool, [=](Pool& one) { return one.complete(stream); });
}

int sfpo_pool_collect(sfpo_pool* pool) {
  return with(pool, [](Pool& one) { return one.collect(); });
}

int sfpo_pool_wait(sfpo_pool* pool) {
  return with(pool, [](Pool& one) { return one.wait(); });
}

int sfpo_pool_allocate_movable(sfpo_pool* pool, uint64_t size, sfpo_pool_handle* handle) {
  return with(pool, [=](Pool& one) { return one.allocate_movable(size, handle); }, handle);
}

int sfpo_pool_pin(sfpo_pool* pool, sfpo_pool_handle handle, void** block) {
  return with(pool, [=](Pool& one) { return one.pin(handle, block); }, block);
}

int sfpo_pool_unpin(sfpo_pool* pool, sfpo_pool_handle handle) {
  return with(pool, [=](Pool& one) { return one.unpin(handle); });
}

int sfpo_pool_free_movable(sfpo_pool* pool, sfpo_pool_handle handle) {
  return with(pool, [=](Pool& one) { return one.free_movable(handle); });
}

int sfpo_pool_compact(sfpo_pool* pool, uint64_t* given_back) {
  return with(pool, [=](Pool& one) { return one.compact(given_back); }, given_back);
}

int sfpo_pool_trim(sfpo_pool* pool) {
  return with(pool, [](Pool& one) { return one.trim(); });
}

int sfpo_pool_check(sfpo_pool* pool) {
  return with(pool, [](Pool& one) { return one.check(); });
}

int sfpo_pool_get_statistics(sfpo_pool* pool, sfpo_pool_statistics* statistics) {
  return with(pool, [=](Pool& one) { return one.statistics(statistics); }, statistics);
}

}  // extern "C"
