// The part of a segment that is stored in a tier, and the two operations that move it out of the
// pool and back. They need no lock of the sequence, and no reader sees the result until it is
// published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/lane.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::cache {

// Bytes in a tier, and the charge for them on the tenant's account.
struct StoredBlob {
  tiers::Blob blob;
  pool::Charge charge;
};

// Rotations, byte for byte. Shared by the segments of a lane that share them in the pool.
struct StoredRotations {
  StoredBlob blob;
  kernels::ElementType type;
  bool turns_keys;
  bool turns_values;
  bool is_book;
  std::uint64_t bytes() const { return blob.blob.bytes(); }
};

// The tiles of a segment, one after another, followed by the summaries of each tile. The table is
// not stored, because it lists pool offsets.
struct StoredTiles {
  StoredBlob blob;
  std::size_t tiles;
  // Null: there are none, or they remain in the pool because other segments need them.
  std::shared_ptr<const StoredRotations> rotations;
  std::uint64_t bytes() const { return blob.blob.bytes(); }
};

// Moves segments to the tier. Used by one thread at a time.
class Offloading {
 public:
  explicit Offloading(const TenantMemory& memory) : memory_(memory) {}

  // Takes the segments of one lane that are in the pool and have no other holder, and their
  // rotations if no other segment uses them. Call under the sequence's lock before taking other
  // references.
  void Take(const Lane& lane);
  bool empty() const { return items_.empty(); }
  // Pool bytes that will be freed.
  std::uint64_t bytes() const;

  // Reserves all room in the tier, then copies. Frees everything on failure.
  absl::Status Run();

  // The replacement of a segment; null if it was not taken.
  std::shared_ptr<Segment> Find(const Segment& segment) const;
  // Drops the references to the source segments.
  void ReleaseSources();

 private:
  struct Item {
    std::shared_ptr<Segment> from;
    std::vector<device::TilePlace> tiles;  // tiles of `from` at that time; it may grow
    std::uint64_t pool_bytes;
    bool with_rotations;
    std::shared_ptr<Segment> to;
  };
  absl::StatusOr<StoredBlob> Reserve(std::uint64_t bytes) const;
  absl::StatusOr<std::shared_ptr<const StoredRotations>> Store(const Rotations& rotations);
  absl::Status Store(Item& item);

  const TenantMemory memory_;
  std::vector<Item> items_;
  absl::flat_hash_map<const Segment*, std::size_t> by_source_;
  absl::flat_hash_map<const Rotations*, std::shared_ptr<const StoredRotations>> rotations_;
};

// Moves segments back to the pool. Used by one thread at a time.
class Restoring {
 public:
  explicit Restoring(const TenantMemory& memory) : memory_(memory) {}

  // Takes the stored segments of a lane.
  void Take(const Lane& lane);
  // Pool bytes that tiles and rotations need.
  std::uint64_t bytes() const { return bytes_; }
  // Reserves all room in the pool, then copies. Frees everything on failure.
  absl::Status Run();
  std::shared_ptr<Segment> Find(const Segment& segment) const;

 private:
  struct Item {
    std::shared_ptr<Segment> from;
    std::shared_ptr<Segment> to;
  };
  absl::Status Reserve(Item& item);
  absl::StatusOr<std::shared_ptr<const Rotations>> Reserve(const StoredRotations& stored);
  absl::Status Fill();
  absl::Status FillTiles(const Item& item);

  const TenantMemory memory_;
  std::vector<Item> items_;
  std::uint64_t bytes_ = 0;
  absl::flat_hash_map<const Segment*, std::size_t> by_source_;
  absl::flat_hash_map<const StoredRotations*, std::shared_ptr<const Rotations>> rotations_;
  std::vector<device::WordStore> words_;  // contents of the new tables
};

}  // namespace tessera::cache
