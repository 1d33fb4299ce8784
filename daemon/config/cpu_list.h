// Sets of CPUs as the kernel writes them: "2-3,8".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::config {

// Ascending. Empty where `text` is. INVALID_ARGUMENT names the part that is no CPU or range, is
// beyond the limit, or has a CPU that is there already. Whether the CPUs exist is not looked at.
absl::StatusOr<std::vector<std::uint32_t>> ParseCpuList(std::string_view text);

// Of an ascending list; neighbours become ranges.
std::string FormatCpuList(const std::vector<std::uint32_t>& cpus);

}  // namespace tessera::config
