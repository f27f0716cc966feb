#include "memory_pool/status.h"

#include <cstdarg>
#include <cstdio>

namespace sfpo::pool {

std::string& last_message() {
  thread_local std::string message;
  return message;
}

Code fail(Code code, const char* form, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, form);
  std::vsnprintf(text, sizeof text, form, arguments);
  va_end(arguments);
  last_message() = text;
  return code;
}

std::string in_words(uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double amount = static_cast<double>(bytes);
  int unit = 0;
  for (; amount >= 1024 && unit < 5; ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, "%.4g %s", amount, units[unit]);
  return text;
}

}  // namespace sfpo::pool
