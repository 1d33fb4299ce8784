// Host memory in sealed memfds.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/device/memory.h"
#include "daemon/platform/memfd.h"

namespace tessera::device {

// Memory that the daemon writes and other processes can only map read-only. Unmapped parts of a
// space read as zeros, so a stale offset never faults.
class HostMemorySource final : public MemorySource {
 public:
  // `name` appears in /proc/PID/maps.
  explicit HostMemorySource(std::string name) : name_(std::move(name)) {}
  absl::StatusOr<std::unique_ptr<Space>> Reserve(std::uint64_t bytes) override;

 private:
  const std::string name_;
};

// Creates memory that a worker writes and the daemon only reads.
absl::StatusOr<std::unique_ptr<Memory>> CreateHostWorkerMemory(std::string_view name,
                                                               std::uint64_t bytes);

}  // namespace tessera::device
