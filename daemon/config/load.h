// From the command line to a Config: file, flags over it, defaults, validation.
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
  // --help, --version, --print-config: write this to stdout and exit 0 instead of serving.
  std::optional<std::string> print;
  // --print-policies: write what policies may say, which is known above this folder, and exit 0.
  bool print_policies = false;
};

// The memory of the device that `choice` comes to on this node.
using MemoryOf = std::function<absl::StatusOr<DeviceMemory>(const DeviceChoice& choice)>;

// The host's memory limit for "cpu" and "auto"; FAILED_PRECONDITION for a CUDA device.
absl::StatusOr<DeviceMemory> HostMemoryOf(const DeviceChoice& choice);

// `args` without the program's name. Errors name the flag, file or field, the value and the limit.
absl::StatusOr<Invocation> LoadConfig(std::span<const std::string_view> args,
                                      const MemoryOf& memory_of = HostMemoryOf);

// The JSON that LoadConfig reads back to the same Config.
std::string PrintConfig(const Config& config);

}  // namespace tessera::config
