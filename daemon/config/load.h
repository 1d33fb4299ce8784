// Builds a Config from the command line: reads the file, applies flags and defaults, validates.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "daemon/config/validate.h"
#include "daemon/platform/prepare_directory.h"

namespace tessera::config {

struct Invocation {
  Config config;
  // Set by --help, --version and --print-config: print this on stdout and exit 0.
  std::optional<std::string> print;
  // Set by --print-policies: print the policy help, which the caller has, and exit 0.
  bool print_policies = false;
  // Set by --check-config: check what the caller can check beyond `config`, and exit.
  bool check_only = false;
  // Set by --prepare-directory: carry it out and exit.
  std::optional<DirectoryRequest> prepare_directory{};
  // What the operator should know about derived values, for the log at start.
  std::vector<std::string> notes{};
};

// Returns the memory of the device that `choice` selects on this node.
using MemoryOf = std::function<absl::StatusOr<DeviceMemory>(const DeviceChoice& choice)>;

// The host's memory limit for "cpu" and "auto"; FAILED_PRECONDITION for a CUDA device.
absl::StatusOr<DeviceMemory> HostMemoryOf(const DeviceChoice& choice);

// `args` excludes the program's name. Errors name the flag, file or field, the value and the limit.
// With --check-config, the error has a line for each value beyond its limits, and a device that
// cannot be opened here is a note: the configuration may be meant for another machine.
absl::StatusOr<Invocation> LoadConfig(std::span<const std::string_view> args,
                                      const MemoryOf& memory_of = HostMemoryOf);

// Prints the JSON that LoadConfig reads back to the same Config.
std::string PrintConfig(const Config& config);

}  // namespace tessera::config
