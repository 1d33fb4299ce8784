// `Pool` is one arena of one device for one tenant, with slab allocation and accounting. Tiles,
// tables and snapshots live in it. It grows by whole extents on demand and releases idle ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/device/device.h"
#include "daemon/pool/account.h"
#include "daemon/pool/arena.h"
#include "daemon/pool/slabs.h"

namespace tessera::pool {

class Pool;

// One object in a pool: 64-byte aligned, charged to its tag and tenant, freed by the destructor. If
// readers may have seen it, it must be retired through Epochs first.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)),
        offset_(other.offset_),
        data_(other.data_),
        charge_(std::move(other.charge_)) {}
  Block& operator=(Block&& other) noexcept {
    if (this != &other) {
      Reset();
      pool_ = std::exchange(other.pool_, nullptr);
      offset_ = other.offset_;
      data_ = other.data_;
      charge_ = std::move(other.charge_);
    }
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { Reset(); }

  bool valid() const { return pool_ != nullptr; }
  std::uint64_t offset() const { return offset_; }
  std::uint64_t bytes() const { return charge_.bytes(); }
  std::byte* data() const { return data_; }
  void Reset();

 private:
  friend class Pool;
  Block(Pool* pool, std::uint64_t offset, std::byte* data, Charge charge)
      : pool_(pool), offset_(offset), data_(data), charge_(std::move(charge)) {}

  Pool* pool_ = nullptr;
  std::uint64_t offset_ = 0;
  std::byte* data_ = nullptr;  // on the device; an extent never moves
  Charge charge_;
};

// Thread-safe. Outlives its Blocks.
class Pool {
 public:
  // Called under the pool's lock for every extent that was added (generation > 0) or removed (0).
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void ExtentChanged(std::uint32_t index, std::uint32_t generation) = 0;
  };
  struct Options {
    Arena::Options arena;
    std::uint64_t slab_bytes;
    Account* tenant;  // charged for objects
    Observer* observer = nullptr;
    bool shrink = true;  // false: extents are never released (the directory)
    // Release no extent while an importer still has one open.
    bool waits_for_importers = false;
    // Clears objects when they are freed, so that rows do not outlive their sequence. For host
    // memory only.
    bool clears = false;
  };
  static absl::StatusOr<std::unique_ptr<Pool>> Create(const Options& options);
  ~Pool();

  // Adds the first extent and excludes its first slab from allocation. `reserved` is an extent's
  // charge on the node's account; it is taken unless adding fails.
  absl::Status AddFirstExtent(Charge& reserved);

  // RESOURCE_EXHAUSTED: the tenant's quota, the node's memory or the address range is used up.
  absl::StatusOr<Block> Allocate(std::uint64_t bytes, Fit fit, MemoryTag tag);
  // Allocates all blocks or none.
  absl::StatusOr<std::vector<Block>> AllocateMany(std::size_t count, std::uint64_t bytes, Fit fit,
                                                  MemoryTag tag);

  // Returns what `importer` needs to map the extent. NOT_FOUND if there is no extent at this index.
  absl::StatusOr<device::Export> ShareExtent(std::uint32_t index, SessionId importer,
                                             std::uint32_t* generation);
  // The importer has closed everything it was given.
  void ImporterGone(SessionId importer);

  // The base of all offsets. Only for host memory may host code dereference it.
  std::byte* base() const { return arena_.base(); }
  device::PoolView View() const;
  std::uint64_t limit_bytes() const { return arena_.limit_bytes(); }
  std::uint64_t extent_bytes() const { return arena_.extent_bytes(); }
  std::uint32_t extents() const;
  std::uint64_t used_bytes() const;
  void Validate() const;

 private:
  friend class Block;
  Pool(const Options& options, Arena arena);
  void Free(std::uint64_t offset, std::uint64_t bytes);
  absl::StatusOr<std::uint64_t> AllocateLocked(std::uint64_t object_bytes) TESSERA_REQUIRES(mutex_);
  absl::Status GrowLocked() TESSERA_REQUIRES(mutex_);
  void AddedLocked(std::uint32_t extent) TESSERA_REQUIRES(mutex_);
  bool ShrinkLocked() TESSERA_REQUIRES(mutex_);

  const Options options_;
  mutable Mutex mutex_;
  Arena arena_;  // base and sizes are constant; the rest is guarded by mutex_
  absl::flat_hash_set<SessionId> importers_ TESSERA_GUARDED_BY(mutex_);
  Slabs slabs_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::pool
