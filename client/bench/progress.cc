#include <unistd.h>

#include <cstdio>

#include "client/bench/bench.h"

namespace tessera::cli::bench {

void Progress(std::string_view text) {
  const bool screen = ::isatty(STDERR_FILENO) != 0;
  std::fprintf(stderr, screen ? "\r\x1b[K%.*s" : "%.*s\n", static_cast<int>(text.size()),
               text.data());
  std::fflush(stderr);
}

void ProgressDone() {
  if (::isatty(STDERR_FILENO) != 0) std::fputs("\r\x1b[K", stderr);
}

}  // namespace tessera::cli::bench
