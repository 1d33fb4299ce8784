// Packing: encodes dense segments in another form. The work needs no lock of the sequence, and no
// reader sees it until it is published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/segment/lane.h"

namespace tessera::cache {

struct PackSpec {
  std::uint32_t first_layer = 0;
  std::vector<kernels::TileShape> shapes;  // one per layer, starting at first_layer
  // [layers][kv_heads][channels][head_dim] in host memory, finite and orthonormal; null: the
  // identity. If rotations are given, all of these layers must have the same shape.
  const std::byte* key_rotations = nullptr;
  const std::byte* value_rotations = nullptr;
  kernels::ElementType rotation_type = kernels::ElementType::kBf16;
};

// Entry counts are summed over lanes.
struct PackOutcome {
  std::uint64_t entries_packed = 0;
  std::uint64_t entries_left = 0;  // in segments that were already packed or had summaries
  std::uint64_t tile_bytes_before = 0;
  std::uint64_t tile_bytes_after = 0;
  std::uint64_t rotation_bytes = 0;  // held by these layers afterwards
};

// Polled during the work; any status other than OK aborts it and becomes its result.
using GoOn = std::function<absl::Status()>;

// One packing operation. Used by one thread at a time.
class Packer {
 public:
  Packer(const TenantMemory& memory, const Model& model, const PackSpec& spec)
      : memory_(memory), model_(model), spec_(spec) {}

  // True if this segment of a lane of this layer is to be re-encoded.
  bool Wants(std::uint32_t layer, const Segment& segment) const;
  // Takes a segment for which Wants is true. While the packer holds it, nothing is appended to it,
  // so the rows that the lane shows do not change; the caller closes the lane's segment. Add lane
  // by lane.
  void Add(std::uint32_t layer, std::uint32_t kv_head, const HeldSegment& held);

  // Reserves all memory, then fills it. Frees everything on failure.
  absl::Status Run(const GoOn& go_on);

  // The replacement of a segment; null if the segment was not added.
  std::shared_ptr<Segment> Find(const Segment& segment) const;
  // Drops the references to the source segments.
  void ReleaseSources();

 private:
  struct Item {
    std::uint32_t layer;
    std::uint32_t kv_head;
    std::shared_ptr<Segment> from;
    std::uint32_t entries;  // number of entries that the lane shows
    std::shared_ptr<Segment> to;
  };
  // Where the rows of an encoded tile come from.
  struct Origin {
    std::size_t item;
    std::uint32_t first_entry;
  };
  struct Batch {
    std::vector<device::TileStrategy> strategies;
    std::vector<device::TileEncode> tiles;
    std::vector<Origin> origins;  // one per tile
  };

  const kernels::TileShape& ShapeOf(std::uint32_t layer) const {
    return spec_.shapes[layer - spec_.first_layer];
  }
  absl::Status Reserve();
  absl::Status ReserveSegment(Item& item, std::shared_ptr<const Rotations> rotations);
  // The matrices of one lane, as far as `spec` has them.
  kernels::RotationView MatricesOf(std::uint32_t layer, std::uint32_t kv_head) const;
  absl::Status StoreRotations();
  absl::Status Fill(const GoOn& go_on);
  void AddTile(std::size_t index, std::uint32_t first_entry, Batch& batch) const;
  absl::Status Flush(const GoOn& go_on, Batch& batch);
  absl::Status NameUnfit(const Batch& batch, std::size_t tile);

  const TenantMemory memory_;
  const Model& model_;
  const PackSpec& spec_;
  std::vector<Item> items_;
  absl::flat_hash_map<const Segment*, std::size_t> by_source_;
  std::vector<device::WordStore> words_;  // contents of the new tables
};

// Totals of adjacent segments of a lane that have the same form.
struct SegmentRun {
  kernels::TileShape shape;
  std::uint32_t segments = 0;
  std::uint64_t entries = 0;
  std::uint64_t tile_bytes = 0;
  std::uint64_t rotation_bytes = 0;
  std::uint64_t table_bytes = 0;
  std::uint64_t summary_bytes = 0;  // part of tile_bytes
  std::uint64_t raw_bytes = 0;      // raw copies in host memory
  std::uint64_t stored_bytes = 0;   // tiles and rotations in a tier
  bool provisional = false;
  std::uint64_t first_position = 0;
  SegmentLoss loss{};  // mean over entries
  bool SameForm(const SegmentRun& other) const {
    return shape == other.shape && provisional == other.provisional;
  }
};
// One run per group of adjacent segments with equal form and strategy, in lane order.
std::vector<SegmentRun> RunsOf(const Lane& lane);
// Adds runs to the sums of the same form.
void AddRuns(const std::vector<SegmentRun>& runs, std::vector<SegmentRun>& sums);

}  // namespace tessera::cache
