// Counters shared by the processes of a soak, in a file that all of them map.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "daemon/base/check.h"
#include "tests/fuzz/stories/story.h"

namespace tessera::fuzz {

struct SoakCounters {
  std::array<std::atomic<std::uint64_t>, kActs> done;
  std::atomic<std::uint64_t> refused;
  std::atomic<std::uint64_t> retried;
  std::atomic<std::uint64_t> outputs_judged;
  std::atomic<std::uint64_t> leases_lost;
};

// The mapping lives as long as the process.
inline SoakCounters& MapCounters(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TESSERA_CHECK(fd >= 0 && ::ftruncate(fd, sizeof(SoakCounters)) == 0, path);
  void* const at = ::mmap(nullptr, sizeof(SoakCounters), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TESSERA_CHECK(at != MAP_FAILED, path);
  ::close(fd);
  return *static_cast<SoakCounters*>(at);
}

}  // namespace tessera::fuzz
