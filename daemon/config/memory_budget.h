// The budget of host memory: what the pool, the host tier, raw copies, the transport and the heap
// may use together. Without it, a daemon with default values could be killed by its cgroup.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "daemon/config/config.h"
#include "daemon/config/validate.h"

namespace tessera::config {

// The memory of a machine that --check-config cannot look at.
inline constexpr std::uint64_t kUnknownMemory = std::numeric_limits<std::uint64_t>::max();

struct MemoryBudget {
  std::uint64_t limit_bytes = 0;  // the smallest of MemTotal and the cgroup limits
  std::string source;             // of limit_bytes
  std::uint64_t pool_bytes = 0;   // 0: the pool is in the memory of a GPU
  std::uint64_t host_tier_bytes = 0;
  std::uint64_t raw_copy_bytes = 0;
  std::uint64_t transport_bytes = 0;  // messages that arrive or leave
  std::uint64_t heap_bytes = 0;       // all other memory of the process

  std::uint64_t sum() const;
  bool fits() const { return limit_bytes == kUnknownMemory || sum() <= limit_bytes; }
  // "pool_bytes 4.0 GiB + host_tier_bytes ... = 7.1 GiB of 8.0 GiB according to ..."
  std::string ToString() const;
};

// The budget of a configuration; fields that are still to be derived count as 0.
MemoryBudget BudgetOf(const Config& config, const DeviceMemory& memory);

// Sets pool_bytes, host_tier_bytes and raw_copy_bytes where the configuration leaves them open: to
// their shares of the limit, or to less if the values that it states leave less.
void DeriveMemory(const DeviceMemory& memory, Config& config);

}  // namespace tessera::config
