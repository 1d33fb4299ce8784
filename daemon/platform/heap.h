// Memory that the allocator keeps after it was freed.
#pragma once

#include <cstdint>

namespace tessera {

// Gives freed memory back to the system when much of it has gathered. The allocator keeps it: after
// a burst of large messages for as long as the process lives.
class HeapTrimmer {
 public:
  // Freed bytes that are worth a walk through the heap.
  static constexpr std::uint64_t kWorthIt = 32 << 20;

  // Cheap unless there is something to give back. Not thread-safe.
  void Trim();

 private:
  std::uint64_t kept_ = 0;  // freed bytes after the last trim: scattered between used ones
};

}  // namespace tessera
