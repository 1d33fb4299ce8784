// Parses and formats CPU sets in the kernel's syntax: "2-3,8".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::config {

// Returns the CPUs in ascending order; none for "". INVALID_ARGUMENT names a part that is not a CPU
// or range, exceeds the limit, or repeats a CPU. Does not check whether the CPUs exist.
absl::StatusOr<std::vector<std::uint32_t>> ParseCpuList(std::string_view text);

// Formats an ascending list; consecutive CPUs become ranges.
std::string FormatCpuList(const std::vector<std::uint32_t>& cpus);

}  // namespace tessera::config
