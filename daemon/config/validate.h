// Derives defaults and checks the limits of a Config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/config/config.h"
#include "daemon/platform/device_uuid.h"
#include "daemon/platform/memory_limit.h"

namespace tessera::config {

// What the configuration depends on: the memory available for pools, the source of that number for
// messages, and the UUID of the device if it has one.
struct DeviceMemory {
  std::uint64_t bytes = 0;
  std::string source;
  std::optional<DeviceUuid> uuid{};
  std::optional<MemoryLimit> host{};  // of the host, for a GPU; nullopt: `bytes` is the host's
};

// Replaces {uuid} in the addresses, and derives what the configuration leaves open: the parts of
// the memory, then the tenants' limits.
absl::Status ResolveDefaults(const DeviceMemory& memory, Config& config);

// Pool bytes that a tenant is guaranteed if its configuration states none: half of an equal share,
// or what its first pool extent needs if that is more and fits for all.
std::uint64_t DerivedReserve(const Config& config, const Tenant& tenant);

// INVALID_ARGUMENT names the field, its value and the limit. Messages never contain a token.
absl::Status Validate(const Config& config, const DeviceMemory& memory);
// Everything that Validate could name, one problem each.
std::vector<absl::Status> FindProblems(const Config& config, const DeviceMemory& memory);

}  // namespace tessera::config
