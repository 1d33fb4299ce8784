// Fd, an owned file descriptor, and helpers for descriptors and errno.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

namespace tessera {

// Move-only; closes the descriptor on destruction.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Close();

 private:
  int fd_ = -1;
};

// Converts errno to a Status, e.g. "mmap of 4096 bytes: Cannot allocate memory".
absl::Status ErrnoStatus(std::string_view what);

// Whether `error` means that this process or the system lacks descriptors or memory.
bool IsShortage(int error);

// Creates a second descriptor of the same open file, close-on-exec.
absl::Status DuplicateFd(int fd, Fd* duplicate);

// Number of open descriptors of this process; for tests and metrics.
int CountOpenFds();

// Raises the soft limit of open descriptors (RLIMIT_NOFILE) to the hard limit, and returns it.
std::uint64_t RaiseFdLimit();

}  // namespace tessera
