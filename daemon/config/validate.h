// Derives defaults and checks the limits of a Config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config/config.h"
#include "daemon/platform/device_uuid.h"

namespace tessera::config {

// What the configuration depends on: the memory available for pools, the source of that number for
// messages, and the UUID of the device if it has one.
struct DeviceMemory {
  std::uint64_t bytes = 0;
  std::string source;
  std::optional<DeviceUuid> uuid;
};

// Replaces {uuid} in the addresses, and 0 by the derived value: pool_bytes, then the tenants'
// limits.
absl::Status ResolveDefaults(const DeviceMemory& memory, Config& config);

// INVALID_ARGUMENT names the field, its value and the limit. Messages never contain a token.
absl::Status Validate(const Config& config, const DeviceMemory& memory);
// Everything that Validate could name, one problem each.
std::vector<absl::Status> FindProblems(const Config& config, const DeviceMemory& memory);

}  // namespace tessera::config
