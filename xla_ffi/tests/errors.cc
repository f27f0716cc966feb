// What must come back from a handler as an error: exceptions, and sizes that overflow.
#include <cstdio>
#include <cstdlib>
#include <new>

#include "ffi_helpers.h"

namespace sfpo {
namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "errors: %s\n", what);
  std::abort();
}

ffi::Error run(int64_t what) {
  if (what == 1) throw std::bad_alloc();
  return what == 2 ? invalid("two") : ffi::Error::Success();
}

void check_guard() {
  require(Guarded<run>::run(0).success(), "a success is an error");
  require(Guarded<run>::run(1).message() == "sfpo_jax: std::bad_alloc", "an exception is lost");
  require(Guarded<run>::run(2).message() == "sfpo_jax: two", "an error is lost");
}

void check_products() {
  constexpr int64_t kHuge = int64_t{1} << 62;
  require(is_product(24, {2, 3, 4}) && is_product(0, {0, 3}), "a product is not one");
  require(!is_product(24, {2, 3}) && !is_product(6, {-2, -3}), "a product is a wrong one");
  // All are 0 modulo 2^64.
  for (int64_t other : {int64_t{4}, int64_t{8}, kHuge}) {
    require(!is_product(0, {kHuge, other}), "an overflow is a product");
  }
}

}  // namespace
}  // namespace sfpo

int main() {
  sfpo::check_guard();
  sfpo::check_products();
  std::puts("errors: nothing wrong");
  return 0;
}
