// Where extents come from: shared host memory, or a CUDA device. An extent is the unit in which a
// pool grows and shrinks, and the unit that is exported to workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/memfd.h"

namespace tessera::pool {

// One exported piece of memory. Destroying it drops the daemon's descriptor and nothing else: the
// address range that it is mapped into resets the place.
class Extent {
 public:
  virtual ~Extent() = default;
  virtual int fd() const = 0;
  virtual std::uint64_t bytes() const = 0;
};

class ExtentSource {
 public:
  virtual ~ExtentSource() = default;
  // Creates an extent and maps it writable at `offset` of `range`. All its memory is allocated
  // here: a write to it later cannot fail.
  virtual absl::StatusOr<std::unique_ptr<Extent>> Create(AddressRange& range, std::uint64_t offset,
                                                         std::uint64_t bytes) = 0;
};

// Sealed memfds: the worker can map them read-only and nothing else.
class SharedMemoryExtents final : public ExtentSource {
 public:
  explicit SharedMemoryExtents(std::string name) : name_(std::move(name)) {}
  absl::StatusOr<std::unique_ptr<Extent>> Create(AddressRange& range, std::uint64_t offset,
                                                 std::uint64_t bytes) override;

 private:
  const std::string name_;  // shown in /proc/PID/maps
};

}  // namespace tessera::pool
