// Derives defaults and checks the limits of a Config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config/config.h"

namespace tessera::config {

// The memory available for pools, and the source of that number for messages.
struct DeviceMemory {
  std::uint64_t bytes = 0;
  std::string source;
};

// Replaces 0 by the derived value: pool_bytes, then the tenants' limits.
absl::Status ResolveDefaults(const DeviceMemory& memory, Config& config);

// INVALID_ARGUMENT names the field, its value and the limit. Messages never contain a token.
absl::Status Validate(const Config& config, const DeviceMemory& memory);
// Everything that Validate could name, one problem each.
std::vector<absl::Status> FindProblems(const Config& config, const DeviceMemory& memory);

}  // namespace tessera::config
