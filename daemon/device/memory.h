// Memory that the daemon owns and workers map: pool extents, tail rings, staging arenas. It is host
// memory in memfds or GPU memory; users handle addresses and exports without knowing the kind.
//
// Addresses are device addresses. Host code may dereference them only on the CPU device, and in
// directories, which are always host memory.
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
  Fd fd;                          // a duplicate owned by the Export; unset for kCudaIpc
  CudaIpcHandle ipc_handle = {};  // for kCudaIpc only
  std::uint64_t bytes = 0;
};

// One piece of memory. The destructor unmaps it here and releases it; mappings in workers remain
// valid.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual std::byte* data() const = 0;
  virtual std::uint64_t bytes() const = 0;
  virtual absl::StatusOr<Export> Share() const = 0;
};

// An address range for an arena, in which pieces of memory are created and destroyed.
class Space {
 public:
  virtual ~Space() = default;
  // Creates a piece at [offset, offset + bytes). All of its memory is allocated before this
  // returns, so later writes cannot fail. The piece must not outlive its space.
  virtual absl::StatusOr<std::unique_ptr<Memory>> Create(std::uint64_t offset,
                                                         std::uint64_t bytes) = 0;
  // The address that offsets are relative to. If pieces are not contiguous, it is not a real
  // address and serves only to convert between addresses and offsets.
  virtual std::byte* base() const = 0;
};

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual absl::StatusOr<std::unique_ptr<Space>> Reserve(std::uint64_t bytes) = 0;
};

}  // namespace tessera::device
