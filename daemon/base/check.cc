#include "daemon/base/check.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace tessera {

void CheckFailed(const char* file, int line, const char* condition, std::string_view detail) {
  const int length = static_cast<int>(std::min<std::size_t>(detail.size(), 4096));
  std::fprintf(stderr, "%s:%d: check failed: %s: %.*s\n", file, line, condition, length,
               detail.data());
  std::fflush(stderr);
  std::abort();
}

}  // namespace tessera
