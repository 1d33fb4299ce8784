// TESSERA_CHECK: reports a broken invariant, which is a bug, and aborts the process. Errors from
// outside (a file, a peer, a limit) are absl::Status instead and must never reach a check.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Writes "FILE:LINE: check failed: CONDITION: detail" to stderr and aborts. It allocates nothing,
// so it works even if the heap is corrupt.
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
