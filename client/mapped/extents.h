// The read-only mappings: the tenant's directory and its pool, whose extents the daemon adds and
// removes.
//
//   reserved address range   [ 0 ][ 1 ][ 2 ][   ][ 4 ][   ][   ] ... up to the limit
//   mapped from the daemon     x    x    x         x              the rest reads as zeros
//
// A stale offset therefore reads zeros or garbage and never faults. A reader compares the header's
// mapping_version to learn whether every extent that it may follow is mapped.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/gpu.h"
#include "client/mapped/descriptors.h"
#include "client/mapped/mapping.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/layout.h"
#include "proto/shm/resolve.h"

namespace tessera::client {

class Extents {
 public:
  // The values in Welcome; the mapped header must agree.
  struct Expected {
    std::uint64_t instance;
    std::uint64_t directory_extent_bytes;
    std::uint64_t pool_extent_bytes;
  };
  // Maps the first directory extent and checks its header. `source` and `gpu` must outlive the
  // result; `gpu` is null if the pool is host memory.
  static absl::StatusOr<std::unique_ptr<Extents>> Open(DescriptorSource& source,
                                                       const Expected& expected, Gpu* gpu);

  // The calls below touch the mappings: only inside the gate.
  const shm::DirectoryHeader& header() const { return *header_; }
  // Whether every extent that exists at the time of the call is mapped.
  bool Current() const {
    return header_->mapping_version.load() == mapped_version_.load(std::memory_order_acquire);
  }
  // Maps new extents and unmaps removed ones.
  absl::Status Refresh();
  // Unmaps removed extents without fetching new ones: the daemon needs the memory back.
  void UnmapRemoved();

  shm::MappedArena directory() const { return {directory_.data(), directory_.bytes()}; }
  shm::MappedArena pool() const { return {pool_->base(), pool_limit_bytes_}; }
  std::uint64_t pool_extent_bytes() const { return pool_extent_bytes_; }
  // On a GPU: the device addresses of the pool's extents.
  void ListPoolExtents(std::vector<std::uint64_t>& addresses) const;
  std::uint32_t pool_extents_mapped() const;

  // Outside the gate, after it has closed.
  void Unmap();

 private:
  Extents(DescriptorSource& source, Gpu* gpu) : source_(source), gpu_(gpu) {}
  absl::Status MapHeader(const Expected& expected);
  absl::Status MapDirectory() TESSERA_REQUIRES(mutex_);
  absl::Status MapPool() TESSERA_REQUIRES(mutex_);
  absl::Status DropPoolExtent(std::uint32_t index) TESSERA_REQUIRES(mutex_);

  DescriptorSource& source_;
  Gpu* const gpu_;
  AddressRange directory_;
  std::unique_ptr<PoolMapping> pool_;
  const shm::DirectoryHeader* header_ = nullptr;
  std::uint64_t directory_extent_bytes_ = 0;
  std::uint64_t pool_extent_bytes_ = 0;
  std::uint64_t pool_limit_bytes_ = 0;
  std::atomic<std::uint64_t> mapped_version_{0};

  mutable Mutex mutex_;
  std::uint32_t directory_extents_ TESSERA_GUARDED_BY(mutex_) = 1;
  std::vector<std::uint32_t> pool_generations_ TESSERA_GUARDED_BY(mutex_);  // 0: not mapped
};

}  // namespace tessera::client
