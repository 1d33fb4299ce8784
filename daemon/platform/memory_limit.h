// Detects how much memory this process may use.
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

// Returns the smallest of MemTotal and the limits of the process's cgroup and its ancestors
// (version 2, version 1 or hybrid). Swap does not count.
//
// Tests set `root`. Fails only if /proc/meminfo cannot be read (NOT_FOUND) or has no MemTotal
// (INVALID_ARGUMENT). A missing or malformed cgroup file counts as no limit.
absl::StatusOr<MemoryLimit> DetectMemoryLimit(const std::filesystem::path& root = "/");

// From now on, freed blocks of 1 MiB and more, and what is free at the end of a heap, return to the
// kernel at once. By default glibc keeps freed buffers of up to 32 MiB, hundreds of MiB in all, for
// the next message. The price is about a fifth of the throughput of appends by messages, so it is
// meant for processes with little memory.
void ReturnFreedMemory();

}  // namespace tessera
