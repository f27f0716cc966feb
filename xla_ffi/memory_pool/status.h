// A code that says what went wrong, and a line that says why.
#pragma once

#include <string>

#include "memory_pool/sfpo_pool.h"

namespace sfpo::pool {

using Code = sfpo_pool_code;

// Of the last call of this thread that failed.
std::string& last_message();

// Keeps the line, of printf's form, and returns the code.
Code fail(Code code, const char* form, ...) __attribute__((format(printf, 2, 3)));

// "1.5 MiB".
std::string in_words(uint64_t bytes);

}  // namespace sfpo::pool
