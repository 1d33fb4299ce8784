// The proof that no other live daemon serves a socket path: an flock on a file beside it. The lock
// goes with the process, however it dies; the file itself stays and is never removed, so that two
// daemons can never lock two different files of one name.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

class LockFile {
 public:
  // ALREADY_EXISTS where another process holds the lock; names it where it wrote its pid.
  static absl::StatusOr<LockFile> Acquire(const std::string& path);

  LockFile(LockFile&&) = default;
  LockFile& operator=(LockFile&&) = default;

 private:
  explicit LockFile(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

}  // namespace tessera
