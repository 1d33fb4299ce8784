#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "daemon/config/config.h"

namespace tessera::config {

// The memory that pools can be taken from, and where that number comes from, for messages.
struct DeviceMemory {
  std::uint64_t bytes = 0;
  std::string source;
};

// Fills in what 0 leaves to be derived: pool_bytes, then the tenants' limits.
absl::Status ResolveDefaults(const DeviceMemory& memory, Config& config);

// INVALID_ARGUMENT names the field, its value and the limit that it breaks. Tokens are never
// quoted.
absl::Status Validate(const Config& config, const DeviceMemory& memory);

}  // namespace tessera::config
