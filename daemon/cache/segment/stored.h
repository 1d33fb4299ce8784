// What of a segment lies in a tier, and the two ways: out of the pool into the tier, and back. The
// work needs no lock of the sequence; no reader sees any of it.
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

// A piece in a tier, and the claim on its tenant's account.
struct StoredBlob {
  tiers::Blob blob;
  pool::Charge charge;
};

// R_k and R_v as they lay in the pool. Shared by the segments of a lane that share them there.
struct StoredRotations {
  StoredBlob blob;
  kernels::ElementType type;
  bool turns_keys;
  bool turns_values;
  std::uint64_t bytes() const { return blob.blob.bytes(); }
};

// The tiles of a segment, one after another, then the summaries of each. Their table is not kept:
// it says where tiles are.
struct StoredTiles {
  StoredBlob blob;
  std::size_t tiles;
  // Null: the segment has none, or others need them in the pool, and it keeps them there.
  std::shared_ptr<const StoredRotations> rotations;
  std::uint64_t bytes() const { return blob.blob.bytes(); }
};

// Segments on their way into the tier. Used by one thread at a time.
class Offloading {
 public:
  explicit Offloading(const TenantMemory& memory) : memory_(memory) {}

  // Under the sequence's lock, before anything is taken: the segments of one lane that nobody else
  // holds and that are in the pool. Their rotations go, too, where nobody else has them.
  void Take(const Lane& lane);
  bool empty() const { return items_.empty(); }
  // Bytes of the pool that go.
  std::uint64_t bytes() const;

  // Reserves room in the tier for all of it, then copies. Where that fails nothing stays behind.
  absl::Status Run();

  // What has become of a segment; null where it was not taken.
  std::shared_ptr<Segment> Find(const Segment& segment) const;
  // Lets go of the segments that were taken.
  void ReleaseSources();

 private:
  struct Item {
    std::shared_ptr<Segment> from;
    std::vector<device::TilePlace> tiles;  // of `from`, which may grow behind them
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

// The same segments on their way back.
class Restoring {
 public:
  explicit Restoring(const TenantMemory& memory) : memory_(memory) {}

  // The stored ones of a lane.
  void Take(const Lane& lane);
  // Bytes of tiles and rotations that the pool takes.
  std::uint64_t bytes() const { return bytes_; }
  // Reserves room in the pool for all of it, then copies. Where that fails nothing stays behind.
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
  std::vector<device::WordStore> words_;  // of the new tables
};

}  // namespace tessera::cache
