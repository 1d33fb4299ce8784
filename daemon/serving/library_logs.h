// LibraryLogs passes on what gRPC and protobuf would write to stderr. A peer can make them write
// without end, with a failed handshake or bytes that are no text.
#pragma once

#include <string_view>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/rate_limit.h"

namespace tessera::serving {

// One per process, because the libraries' hooks are. While it lives, their errors are warnings of
// the daemon's log, one a second at most.
class LibraryLogs {
 public:
  LibraryLogs(Logger& logger, const Clock& clock);
  ~LibraryLogs();
  LibraryLogs(const LibraryLogs&) = delete;
  LibraryLogs& operator=(const LibraryLogs&) = delete;

  // Thread-safe.
  void Write(std::string_view library, std::string_view message);

 private:
  Logger& logger_;
  const Clock& clock_;
  LogRateLimit lines_;
};

}  // namespace tessera::serving
