// How much memory this process may use before the kernel takes it away.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

struct MemoryLimit {
  std::uint64_t bytes = 0;
  std::string source;  // where the number comes from: "/proc/meminfo MemTotal" or a cgroup file
};

// The least of MemTotal and every limit of the process's own cgroup and of the cgroups above it,
// version 2, version 1 or both (hybrid). Swap does not count: a pool that swaps is no pool.
//
// `root` stands for "/" and is there for tests. NOT_FOUND or INVALID_ARGUMENT only where
// /proc/meminfo cannot be read or has no MemTotal; a cgroup file that is missing or malformed is no
// limit.
absl::StatusOr<MemoryLimit> DetectMemoryLimit(const std::filesystem::path& root = "/");

}  // namespace tessera
