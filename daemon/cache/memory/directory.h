// `Directory` is the tenant's mapped index, through which readers find everything else. It owns the
// epoch word, the extent tables, the sequence blocks and the snapshots. All of it is host memory,
// whatever the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
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
    pool::Account* node;
    pool::Account* tenant;
    device::MemorySource* source;
    std::function<void()> on_extent_gone;  // called under the pool's lock: signal, do not act
  };
  static absl::StatusOr<std::unique_ptr<Directory>> Create(const Options& options);

  // Observes the extents of the data pool; pass it to that pool. DescribePool is called once.
  pool::Pool::Observer* pool_observer() { return &pool_observer_; }
  void DescribePool(std::uint64_t extent_bytes, std::uint64_t limit_bytes);

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
  Directory() = default;

  std::function<void()> on_extent_gone_;
  std::atomic<std::uint64_t> extents_gone_{0};
  OwnObserver own_observer_;
  PoolObserver pool_observer_;
  std::unique_ptr<pool::Pool> pool_;
  shm::DirectoryHeader* header_ = nullptr;
};

// The slab must hold the header, and extents are whole slabs.
inline constexpr std::uint64_t kDirectorySlabBytes = 256 * 1024;
static_assert(sizeof(shm::DirectoryHeader) <= kDirectorySlabBytes);
static_assert(sizeof(shm::SequenceBlock) + 8 * shm::kMaxLanes <= kDirectorySlabBytes);
static_assert(sizeof(shm::Snapshot) + sizeof(shm::SegmentRef) * shm::kMaxSegments <=
              kDirectorySlabBytes);

}  // namespace tessera::cache
