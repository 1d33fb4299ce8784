// Memory in sealed memfds.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/device/memory.h"
#include "daemon/platform/memfd.h"

namespace tessera::device {

// What the daemon writes: another process can map it read-only and nothing else. Where nothing is
// mapped, the space reads as zeros: an offset that is stale never faults.
class HostMemorySource final : public MemorySource {
 public:
  // `name` is shown in /proc/PID/maps.
  explicit HostMemorySource(std::string name) : name_(std::move(name)) {}
  absl::StatusOr<std::unique_ptr<Space>> Reserve(std::uint64_t bytes) override;

 private:
  const std::string name_;
};

// What a worker writes and the daemon only reads.
absl::StatusOr<std::unique_ptr<Memory>> CreateHostWorkerMemory(std::string_view name,
                                                               std::uint64_t bytes);

}  // namespace tessera::device
