// LockFile ensures that only one live daemon serves a socket path: an flock on a file next to it.
// The kernel releases the lock when the process ends. The file is never removed, so two daemons
// cannot hold locks on two different files of the same name.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

class LockFile {
 public:
  // ALREADY_EXISTS if another process holds the lock; the message has its pid if known.
  static absl::StatusOr<LockFile> Acquire(const std::string& path);

  LockFile(LockFile&&) = default;
  LockFile& operator=(LockFile&&) = default;

 private:
  explicit LockFile(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

}  // namespace tessera
