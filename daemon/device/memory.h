// Memory that the daemon owns and workers map: extents of pools, tail rings, staging arenas. Host
// memory in memfds, or a GPU's; whoever holds it handles addresses and exports, never the kind.
//
// Addresses are the device's. Host code may follow them where the device is the CPU, or for a
// directory, which is always host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/fd.h"
#include "proto/shm/descriptors.h"

namespace tessera::device {

// What another process needs to map a piece of memory.
struct Export {
  shm::MemoryKind kind = shm::MemoryKind::kHost;
  Fd fd;                          // of its own; not for kCudaIpc
  CudaIpcHandle ipc_handle = {};  // of kCudaIpc
  std::uint64_t bytes = 0;
};

// One piece. The destructor unmaps it here and gives it back; what a worker has mapped stays with
// the worker.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte* data() const = 0;
  virtual std::uint64_t bytes() const = 0;
  virtual absl::StatusOr<Export> Share() const = 0;
};

// Addresses for an arena, in which pieces come and go.
class Space {
 public:
  virtual ~Space() = default;
  // A piece at [offset, offset + bytes). All of its memory is there when this returns: a write to
  // it later cannot fail. It goes before its space.
  virtual absl::StatusOr<std::unique_ptr<Memory>> Create(std::uint64_t offset,
                                                         std::uint64_t bytes) = 0;
  // What offsets are counted from. Where pieces need not be contiguous it is good for arithmetic
  // alone: the difference of two addresses made with it is a difference of offsets.
  virtual std::byte* base() const = 0;
};

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual absl::StatusOr<std::unique_ptr<Space>> Reserve(std::uint64_t bytes) = 0;
};

}  // namespace tessera::device
