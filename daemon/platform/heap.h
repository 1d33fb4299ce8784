// What is left in the heap when memory is freed: bytes for the allocator, and contents.
#pragma once

#include <malloc.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>

namespace tessera {

// Bytes that are cleared when they are freed.
struct ClearAndDelete {
  std::size_t bytes = 0;
  void operator()(std::byte* data) const {
    ::explicit_bzero(data, bytes);
    delete[] data;
  }
};
using ClearedBytes = std::unique_ptr<std::byte[], ClearAndDelete>;

// Not initialised. nullptr if the system has no more memory.
inline ClearedBytes NewClearedBytes(std::size_t bytes) {
  return ClearedBytes(new (std::nothrow) std::byte[bytes], ClearAndDelete{bytes});
}

// Gives freed memory back to the system when much of it has gathered. The allocator keeps it: after
// a burst of large messages for as long as the process lives.
class HeapTrimmer {
 public:
  // Freed bytes that are worth a walk through the heap.
  static constexpr std::uint64_t kWorthIt = 16 << 20;

  // Cheap unless there is something to give back. Not thread-safe.
  void Trim() {
#ifdef __GLIBC__
    const std::uint64_t idle = Idle();
    least_ = std::min(least_, idle);
    if (idle - least_ < kWorthIt) return;
    (void)::malloc_trim(0);
    least_ = Idle();
#endif
  }

 private:
#ifdef __GLIBC__
  // Resident memory that the allocator has and nobody uses. What it has trimmed counts as free to
  // it, but is not resident.
  static std::uint64_t Idle() {
    const struct mallinfo2 info = ::mallinfo2();
    std::uint64_t pages = 0;
    std::uint64_t resident = 0;
    std::uint64_t shared = 0;
    if (std::FILE* const file = std::fopen("/proc/self/statm", "re")) {
      if (std::fscanf(file, "%" SCNu64 " %" SCNu64 " %" SCNu64, &pages, &resident, &shared) != 3) {
        resident = shared = 0;
      }
      std::fclose(file);
    }
    const std::uint64_t own =
        (resident - shared) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t used = info.uordblks + info.hblkhd;
    return own > used ? own - used : 0;
  }
#endif

  // After the last trim, or since: free bytes between used ones, and memory beside the heap.
  std::uint64_t least_ = 0;
};

}  // namespace tessera
