// A broken invariant is a bug: the process says which one and aborts. Faults of the outside world
// (a file, a peer, a limit) are absl::Status instead, and must never reach these.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Writes "FILE:LINE: check failed: CONDITION: detail" to stderr and aborts. Allocates nothing, so
// that it also works when the heap is what broke.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              std::string_view detail);

}  // namespace tessera

// `detail` (a string or string_view expression) is evaluated only on failure.
#define TESSERA_CHECK(condition, detail)                                \
  do {                                                                  \
    if (!(condition)) [[unlikely]] {                                    \
      ::tessera::CheckFailed(__FILE__, __LINE__, #condition, (detail)); \
    }                                                                   \
  } while (false)
