// Checks of buffers before a handler touches them: an error becomes a Python exception.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace sfpo {

namespace ffi = xla::ffi;

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("sfpo_jax: " + message);
}

#define SFPO_RETURN_IF_ERROR(expression)                                     \
  do {                                                                       \
    if (::xla::ffi::Error sfpo_error = (expression); sfpo_error.failure()) { \
      return sfpo_error;                                                     \
    }                                                                        \
  } while (false)

// `function`, with what it throws as an error: where memory ends a vector throws, and XLA is
// compiled without exceptions, so that one which reached it would end the process.
template <auto function, typename Function = decltype(function)>
struct Guarded;

template <auto function, typename... Args>
struct Guarded<function, ffi::Error (*)(Args...)> {
  static ffi::Error run(Args... args) {
    try {
      return function(std::move(args)...);
    } catch (const std::exception& error) {
      return ffi::Error::Internal(std::string("sfpo_jax: ") + error.what());
    }
  }
};

// Whether `size` is the product of these, which may be any numbers at all.
inline bool is_product(int64_t size, std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  bool is_right = true;
  for (int64_t factor : factors) {
    is_right = is_right && factor >= 0 && !__builtin_mul_overflow(product, factor, &product);
  }
  return is_right && product == size;
}

// A handler under the name that Python registers, visible outside the library; after
// `binding`, its traits if it has any.
#define SFPO_DEFINE_HANDLER(name, function, ...)                                             \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (::sfpo::Guarded<function>::run), __VA_ARGS__)

// A flat view of one operand or result.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t size = 0;

  operator View<const T>() const { return {data, size}; }
};

template <typename T>
using Views = std::vector<View<T>>;

// Entry `start` of array `i`; null where there are no such arrays.
template <typename T>
T* at(const Views<T>& views, int64_t i, int64_t start) {
  return views.empty() ? nullptr : views[i].data + start;
}

// One whose dtype its reader looks at.
struct UntypedView {
  const void* data = nullptr;
  int64_t size = 0;
  ffi::DataType dtype = ffi::DataType::INVALID;
};

template <typename T>
inline constexpr ffi::DataType kDataType = ffi::DataType::INVALID;
template <>
inline constexpr ffi::DataType kDataType<float> = ffi::F32;
template <>
inline constexpr ffi::DataType kDataType<bool> = ffi::PRED;
template <>
inline constexpr ffi::DataType kDataType<uint8_t> = ffi::U8;
template <>
inline constexpr ffi::DataType kDataType<int8_t> = ffi::S8;
template <>
inline constexpr ffi::DataType kDataType<uint16_t> = ffi::U16;
template <>
inline constexpr ffi::DataType kDataType<uint32_t> = ffi::U32;

// Takes a handler's operands and results in order. The first thing that is wrong is kept,
// and all that is taken after it is empty: look at `error` before using any of it.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  // The next `count` operands, of any dtype.
  std::vector<UntypedView> untyped_operands(const char* name, int64_t count) {
    std::vector<UntypedView> views;
    for (int64_t i = 0; i < count && error_.success(); ++i) {
      auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
      if (buffer.has_error()) {
        fail(std::string("there is no `") + name + "` " + std::to_string(i));
      } else {
        int64_t size = buffer->element_count();
        views.push_back({buffer->untyped_data(), size, buffer->element_type()});
      }
    }
    return views;
  }

  // The next `count` operands, of dtype T.
  template <typename T>
  Views<const T> operands(const char* name, int64_t count) {
    Views<const T> views;
    for (const UntypedView& view : untyped_operands(name, count)) {
      if (!is_of<T>(view.dtype, name, views.size())) return {};
      views.push_back({static_cast<const T*>(view.data), view.size});
    }
    return views;
  }

  // The next `count` results, of dtype T.
  template <typename T>
  Views<T> results(const char* name, int64_t count) {
    Views<T> views;
    for (int64_t i = 0; i < count && error_.success(); ++i) {
      auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_++);
      if (buffer.has_error()) {
        fail(std::string("there is no result `") + name + "` " + std::to_string(i));
      } else if (is_of<T>((*buffer)->element_type(), name, i)) {
        int64_t size = (*buffer)->element_count();
        views.push_back({static_cast<T*>((*buffer)->untyped_data()), size});
      }
    }
    return views;
  }

  // Requires as many entries in each of `found` as in that of `wanted`; none may be absent.
  template <typename A, typename B>
  void require_sizes(const char* name, const std::vector<A>& found, const std::vector<B>& wanted) {
    for (size_t i = 0; i < found.size() && error_.success(); ++i) {
      if (found[i].size != wanted[i].size) {
        fail(std::string("`") + name + "` " + std::to_string(i) + " has " +
             std::to_string(found[i].size) + " entries, needs " + std::to_string(wanted[i].size));
      }
    }
  }

  void require(bool condition, const char* message) {
    if (!condition && error_.success()) fail(message);
  }

  // What was wrong first; also buffers that nobody took.
  ffi::Error error() {
    require(next_arg_ == args_.size() && next_ret_ == rets_.size(),
            "got more arrays than its attributes say");
    return error_;
  }

 private:
  void fail(const std::string& message) { error_ = invalid(message); }

  template <typename T>
  bool is_of(ffi::DataType found, const char* name, int64_t i) {
    bool is_right = found == kDataType<T>;
    if (!is_right) fail(std::string("`") + name + "` " + std::to_string(i) + " has a wrong dtype");
    return is_right;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t next_arg_ = 0;
  size_t next_ret_ = 0;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace sfpo
