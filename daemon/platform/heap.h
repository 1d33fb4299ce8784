// What is left in the heap when memory is freed: bytes for the allocator, and contents.
#pragma once

#include <malloc.h>
#include <string.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
  static constexpr std::uint64_t kWorthIt = 32 << 20;

  // Cheap unless there is something to give back. Not thread-safe.
  void Trim() {
#ifdef __GLIBC__
    const std::uint64_t freed = ::mallinfo2().fordblks;
    kept_ = std::min(kept_, freed);
    if (freed - kept_ < kWorthIt) return;
    (void)::malloc_trim(0);
    kept_ = ::mallinfo2().fordblks;
#endif
  }

 private:
  std::uint64_t kept_ = 0;  // freed bytes after the last trim: scattered between used ones
};

}  // namespace tessera
