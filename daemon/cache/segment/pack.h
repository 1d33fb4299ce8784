// Segments on their way from dense rows into another form: what a packing asks for, and the work of
// it, which no reader sees and which needs no lock of the sequence.
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
  std::vector<kernels::TileShape> shapes;  // of each layer from there on
  // [layers][kv_heads][channels][head_dim] in host memory, finite and orthonormal; null: the
  // identity. Where there are any, all of these layers have the same shape.
  const std::byte* key_rotations = nullptr;
  const std::byte* value_rotations = nullptr;
  kernels::ElementType rotation_type = kernels::ElementType::kBf16;
};

// Entries are counted lane by lane.
struct PackOutcome {
  std::uint64_t entries_packed = 0;
  std::uint64_t entries_left = 0;  // in segments that were packed, or summed up, before
  std::uint64_t tile_bytes_before = 0;
  std::uint64_t tile_bytes_after = 0;
  std::uint64_t rotation_bytes = 0;  // that these layers hold afterwards
};

// Asked now and then; anything but OK ends the work, and is its answer.
using GoOn = std::function<absl::Status()>;

// One packing. Used by one thread at a time.
class Packer {
 public:
  Packer(const TenantMemory& memory, const Model& model, const PackSpec& spec)
      : memory_(memory), model_(model), spec_(spec) {}

  // Whether a lane of this layer has its segment encoded anew.
  bool Wants(std::uint32_t layer, const Segment& segment) const;
  // Takes a segment that is wanted. As long as it is held here nobody appends to it, so that the
  // rows that the lane shows stay as they are; the lane closes it. Lane by lane.
  void Add(std::uint32_t layer, std::uint32_t kv_head, const HeldSegment& held);

  // Reserves memory for all of it, then fills it. Where that fails, nothing stays behind.
  absl::Status Run(const GoOn& go_on);

  // What has become of a segment; null where it was never added.
  std::shared_ptr<Segment> Find(const Segment& segment) const;
  // Lets go of the segments that came in.
  void ReleaseSources();

 private:
  struct Item {
    std::uint32_t layer;
    std::uint32_t kv_head;
    std::shared_ptr<Segment> from;
    std::uint32_t entries;  // of `from` that the lane shows
    std::shared_ptr<Segment> to;
  };
  // Where an encoded tile came from.
  struct Origin {
    std::size_t item;
    std::uint32_t first_entry;
  };
  struct Batch {
    std::vector<device::TileStrategy> strategies;
    std::vector<device::TileEncode> tiles;
    std::vector<Origin> origins;  // of each tile
  };

  const kernels::TileShape& ShapeOf(std::uint32_t layer) const {
    return spec_.shapes[layer - spec_.first_layer];
  }
  absl::Status Reserve();
  absl::Status ReserveSegment(Item& item, std::shared_ptr<const Rotations> rotations);
  // Of a lane: all that `spec` has.
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
  std::vector<device::WordStore> words_;  // of the new tables
};

// What a lane's segments hold, form by form.
struct SegmentRun {
  kernels::TileShape shape;
  std::uint32_t segments = 0;
  std::uint64_t entries = 0;
  std::uint64_t tile_bytes = 0;
  std::uint64_t rotation_bytes = 0;
  std::uint64_t table_bytes = 0;
  std::uint64_t raw_bytes = 0;     // of copies in host memory
  std::uint64_t stored_bytes = 0;  // of tiles and rotations that are in a tier
  bool provisional = false;
  std::uint64_t first_position = 0;
  SegmentLoss loss{};  // the mean over entries
  bool SameForm(const SegmentRun& other) const {
    return shape == other.shape && provisional == other.provisional;
  }
};
// In the order of the lane; neighbours of the same form and strategy are one run.
std::vector<SegmentRun> RunsOf(const Lane& lane);
// Adds runs to those of the same form.
void AddRuns(const std::vector<SegmentRun>& runs, std::vector<SegmentRun>& sums);

}  // namespace tessera::cache
