// `Directory` is the tenant's mapped index, through which readers find everything else. It owns the
// epoch word, the extent tables, the sequence blocks and the snapshots. All of it is host memory,
// whatever the device.
//
// Its memory is reserved in the node's account from the start but allocated by the first session,
// so that tenants without workers use none.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/pool/pool.h"
#include "proto/shm/layout.h"
#include "proto/shm/resolve.h"

namespace tessera::cache {

class Directory {
 public:
  struct Options {
    std::uint64_t extent_bytes;
    std::uint64_t limit_bytes;
    std::uint64_t instance;
    std::uint64_t pool_extent_bytes;  // of the data pool
    std::uint64_t pool_limit_bytes;
    pool::Account* node;
    pool::Account* tenant;
    device::MemorySource* source;
    std::function<void()> on_extent_gone;  // called under the pool's lock: signal, do not act
  };
  // RESOURCE_EXHAUSTED: the node's account has no room for the first extent.
  static absl::StatusOr<std::unique_ptr<Directory>> Create(const Options& options);

  // Allocates the first extent and the header in it. Idempotent, thread-safe. Until it has
  // succeeded, nothing else may be called than pool_observer, epoch, pool and extents_gone, and the
  // epoch must not be used.
  absl::Status Open();

  // Observes the extents of the data pool; pass it to that pool.
  pool::Pool::Observer* pool_observer() { return &pool_observer_; }

  shm::Word* epoch() { return &header_->epoch; }
  pool::Pool& pool() { return *pool_; }
  const shm::DirectoryHeader& header() const { return *header_; }
  // Number of extents the data pool has released since start.
  std::uint64_t extents_gone() const { return extents_gone_.load(); }
  shm::MappedArena mapped() const { return {pool_->base(), pool_->limit_bytes()}; }

  // Allocates a zeroed block for `lanes` lanes. Returns RESOURCE_EXHAUSTED if there is no room.
  absl::StatusOr<pool::Block> AllocateSequenceBlock(std::uint32_t lanes);
  absl::StatusOr<pool::Block> AllocateSnapshot(std::uint32_t segments);

 private:
  class OwnObserver final : public pool::Pool::Observer {
   public:
    void ExtentChanged(std::uint32_t index, std::uint32_t generation) override;
    Directory* directory = nullptr;
  };
  class PoolObserver final : public pool::Pool::Observer {
   public:
    void ExtentChanged(std::uint32_t index, std::uint32_t generation) override;
    Directory* directory = nullptr;
  };
  explicit Directory(const Options& options) : options_(options) {}

  const Options options_;
  mutable Mutex mutex_;  // for opening; locked before the pool's
  bool open_ TESSERA_GUARDED_BY(mutex_) = false;
  pool::Charge reserved_ TESSERA_GUARDED_BY(mutex_);  // for the first extent, until it is there
  std::atomic<std::uint64_t> extents_gone_{0};
  OwnObserver own_observer_;
  PoolObserver pool_observer_;
  std::unique_ptr<pool::Pool> pool_;
  shm::DirectoryHeader* header_ = nullptr;  // where it is, or will be
};

// The slab must hold the header, and extents are whole slabs.
inline constexpr std::uint64_t kDirectorySlabBytes = 256 * 1024;
static_assert(sizeof(shm::DirectoryHeader) <= kDirectorySlabBytes);
static_assert(sizeof(shm::SequenceBlock) + 8 * shm::kMaxLanes <= kDirectorySlabBytes);
static_assert(sizeof(shm::Snapshot) + sizeof(shm::SegmentRef) * shm::kMaxSegments <=
              kDirectorySlabBytes);

}  // namespace tessera::cache
