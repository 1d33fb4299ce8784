// Memory followed by an unreadable page: an access past the end faults, even in code without
// sanitizer checks.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

#include "daemon/base/check.h"

namespace tessera::fuzz {

class Guarded {
 public:
  explicit Guarded(std::size_t most)
      : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
        bytes_((most + page_ - 1) / page_ * page_) {
    void* base =
        ::mmap(nullptr, bytes_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TESSERA_CHECK(base != MAP_FAILED, "guarded memory");
    base_ = static_cast<std::byte*>(base);
    TESSERA_CHECK(::mprotect(base_ + bytes_, page_, PROT_NONE) == 0, "the guard page");
  }
  ~Guarded() { ::munmap(base_, bytes_ + page_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // The last `bytes`, a multiple of `unit` so that they begin aligned.
  std::byte* Last(std::size_t bytes, std::size_t unit = 64) const {
    TESSERA_CHECK(bytes <= bytes_ && bytes % unit == 0, "more than there is, or not whole units");
    return base_ + bytes_ - bytes;
  }

 private:
  const std::size_t page_;
  const std::size_t bytes_;
  std::byte* base_;
};

constexpr std::size_t WholeUnits(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace tessera::fuzz
