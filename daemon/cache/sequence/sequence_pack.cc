// How a sequence's segments are packed: taken under the lock, encoded without it, published under
// it.

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

namespace {

struct Bytes {
  std::uint64_t tiles = 0;
  std::uint64_t rotations = 0;
};

Bytes BytesOf(const Lane& lane) {
  Bytes bytes;
  for (const SegmentRun& run : RunsOf(lane)) {
    bytes.tiles += run.tile_bytes;
    bytes.rotations += run.rotation_bytes;
  }
  return bytes;
}

}  // namespace

absl::StatusOr<PackOutcome> Sequence::Pack(const PackSpec& spec, const GoOn& go_on) {
  TESSERA_CHECK(spec.first_layer + spec.shapes.size() <= model_->layers(),
                "the caller checked the layers");
  Packer packer(memory_, *model_, spec);  // outlives the lock: its destructor frees pool memory
  {
    MutexLock lock(mutex_);
    if (absl::Status status = TakeForPacking(spec, packer); !status.ok()) return status;
  }
  absl::Status status = packer.Run(go_on);
  MutexLock lock(mutex_);
  packing_ = false;
  if (status.ok()) status = Usable();
  if (!status.ok()) return status;
  absl::StatusOr<PackOutcome> outcome = PublishPacked(spec, packer);
  if (outcome.ok() && outcome->entries_packed > 0) set_has_manual_changes();
  return outcome;
}

absl::Status Sequence::TakeForPacking(const PackSpec& spec, Packer& packer) {
  if (absl::Status status = Resident(); !status.ok()) return status;
  const bool recoding =
      std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.recoding; });
  if (packing_ || recoding) {
    return WithCause(
        absl::AbortedError(
            Concat(id_.ToString(), " is being compressed by another call; retry when it is done")),
        ErrorCause::kSequenceBusy);
  }
  packing_ = true;
  if (lanes_.empty()) return absl::OkStatus();
  for (std::uint32_t i = 0; i < spec.shapes.size(); ++i) {
    const std::uint32_t layer = spec.first_layer + i;
    for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
      Lane& lane = lanes_[model_->layout().lane(layer, head)];
      for (const HeldSegment& held : lane.segments) {
        if (packer.Wants(layer, *held.segment)) packer.Add(layer, head, held);
      }
      // Closed as if shared with a fork: rows appended from now on go to another segment. If the
      // packing fails, the lane may reopen it.
      lane.open = false;
    }
  }
  return absl::OkStatus();
}

// Lanes may have been cut, forked or appended to since. Replaces the segments that they still hold,
// keeping each lane's current entry count.
absl::StatusOr<PackOutcome> Sequence::PublishPacked(const PackSpec& spec, Packer& packer) {
  if (lanes_.empty()) return PackOutcome();
  const shm::LaneLayout& layout = model_->layout();
  const auto layers = static_cast<std::uint32_t>(spec.shapes.size());
  const std::uint32_t first = layout.lane(spec.first_layer, 0);
  const std::uint32_t end = spec.first_layer + layers == layout.layers()
                                ? layout.lanes()
                                : layout.lane(spec.first_layer + layers, 0);
  std::vector<pool::Block> snapshots;
  for (std::uint32_t i = first; i < end; ++i) {
    absl::StatusOr<pool::Block> snapshot =
        memory_.directory->AllocateSnapshot(static_cast<std::uint32_t>(lanes_[i].segments.size()));
    if (!snapshot.ok()) return snapshot.status();
    snapshots.push_back(*std::move(snapshot));
  }
  PackOutcome outcome;
  Replaced replaced;
  TenantCounters& counters = *memory_.counters;
  for (std::uint32_t i = first; i < end; ++i) {
    Lane& lane = lanes_[i];
    const std::size_t replaced_before = replaced.segments.size();
    outcome.tile_bytes_before += BytesOf(lane).tiles;
    for (HeldSegment& held : lane.segments) {
      std::shared_ptr<Segment> packed = packer.Find(*held.segment);
      if (packed == nullptr) {
        if (!held.segment->appendable()) outcome.entries_left += held.entries;
        continue;
      }
      counters.tiles_written.fetch_add(packed->tiles(), std::memory_order_relaxed);
      counters.pack_bytes_before.fetch_add(held.segment->tile_bytes(), std::memory_order_relaxed);
      counters.pack_bytes_after.fetch_add(packed->tile_bytes(), std::memory_order_relaxed);
      outcome.entries_packed += held.entries;
      replaced.segments.push_back(std::exchange(held.segment, std::move(packed)));
    }
    const Bytes after = BytesOf(lane);
    outcome.tile_bytes_after += after.tiles;
    outcome.rotation_bytes += after.rotations;
    if (replaced.segments.size() > replaced_before) {
      lane.growing = false;  // another segment is now the last one before the dense ones
      PublishLane(i, std::move(snapshots[i - first]), replaced);
    }
  }
  counters.entries_packed.fetch_add(outcome.entries_packed, std::memory_order_relaxed);
  packer.ReleaseSources();
  FinishPublication(std::move(replaced));
  return outcome;
}

}  // namespace tessera::cache
