#include "daemon/platform/heap.h"

#include <malloc.h>

#include <algorithm>

namespace tessera {

void HeapTrimmer::Trim() {
#ifdef __GLIBC__
  const std::uint64_t freed = ::mallinfo2().fordblks;
  kept_ = std::min(kept_, freed);
  if (freed - kept_ < kWorthIt) return;
  (void)::malloc_trim(0);
  kept_ = ::mallinfo2().fordblks;
#endif
}

}  // namespace tessera
