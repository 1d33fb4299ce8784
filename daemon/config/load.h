// Builds a Config from the command line: reads the file, applies flags and defaults, validates.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "daemon/config/validate.h"

namespace tessera::config {

struct Invocation {
  Config config;
  // Set by --help, --version and --print-config: print this on stdout and exit 0.
  std::optional<std::string> print;
  // Set by --print-policies: print the policy help, which the caller has, and exit 0.
  bool print_policies = false;
};

// Returns the memory of the device that `choice` selects on this node.
using MemoryOf = std::function<absl::StatusOr<DeviceMemory>(const DeviceChoice& choice)>;

// The host's memory limit for "cpu" and "auto"; FAILED_PRECONDITION for a CUDA device.
absl::StatusOr<DeviceMemory> HostMemoryOf(const DeviceChoice& choice);

// `args` excludes the program's name. Errors name the flag, file or field, the value and the limit.
absl::StatusOr<Invocation> LoadConfig(std::span<const std::string_view> args,
                                      const MemoryOf& memory_of = HostMemoryOf);

// Prints the JSON that LoadConfig reads back to the same Config.
std::string PrintConfig(const Config& config);

}  // namespace tessera::config
