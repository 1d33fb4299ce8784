// The read-only mappings: the tenant's directory, and its pool of extents that come and go.
//
//   reserved address range   [ 0 ][ 1 ][ 2 ][   ][ 4 ][   ][   ] ... up to the limit
//   mapped from the daemon     x    x    x         x              the rest reads as zeros
//
// An offset that is stale therefore reads zeros or garbage; it never faults. A reader compares one
// word, the header's mapping_version, to know that everything it may follow is mapped.
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
  // What Welcome said; the mapped header must agree.
  struct Expected {
    std::uint64_t instance;
    std::uint64_t directory_extent_bytes;
    std::uint64_t pool_extent_bytes;
  };
  // `source` and `gpu` outlive the extents; `gpu` is null where the pool is host memory. Maps the
  // first directory extent and checks its header.
  static absl::StatusOr<std::unique_ptr<Extents>> Open(DescriptorSource& source,
                                                       const Expected& expected, Gpu* gpu);

  // Calls below touch the mappings: only inside the gate.
  const shm::DirectoryHeader& header() const { return *header_; }
  // True where every extent that existed when this was called is mapped.
  bool Current() const {
    return header_->mapping_version.load() == mapped_version_.load(std::memory_order_acquire);
  }
  // Maps what came and unmaps what went.
  absl::Status Refresh();
  // Unmaps what went, and fetches nothing: the daemon wants the memory back.
  void DropGone();

  shm::MappedArena directory() const { return {directory_.data(), directory_.bytes()}; }
  shm::MappedArena pool() const { return {pool_->base(), pool_limit_bytes_}; }
  std::uint64_t pool_extent_bytes() const { return pool_extent_bytes_; }
  // On a GPU: where its extents are.
  void ListPoolExtents(std::vector<std::uint64_t>& addresses) const;
  std::uint32_t pool_extents_mapped() const;

  // Outside the gate, once it is closed.
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
