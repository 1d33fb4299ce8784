// An owned file descriptor, and the error text of a failed system call.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

namespace tessera {

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

// errno as a Status, e.g. "mmap of 4096 bytes: Cannot allocate memory". Reads errno at once.
absl::Status ErrnoStatus(std::string_view what);

// Whether errno says that this process or the system is short of descriptors or memory.
bool IsShortage(int error);

// A second descriptor of the same open file.
absl::Status DuplicateFd(int fd, Fd* duplicate);

// Descriptors open in this process; for tests and metrics.
int CountOpenFds();

// Lets this process open as many descriptors as it may (RLIMIT_NOFILE). Returns how many that is.
std::uint64_t RaiseFdLimit();

}  // namespace tessera
