#include "daemon/compaction/lanes/layer_keys.h"

#include <vector>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/cache/segment/build.h"
#include "daemon/compaction/observation/lane_entries.h"

namespace tessera::compaction {

using kernels::kTileEntries;

namespace {

// The arguments of Device::LoadKeys for one lane, and the host copies that they point to.
class KeyRuns {
 public:
  KeyRuns(const cache::OpenRun& run, kernels::DenseTile dense) : dense_(dense), tiles_(run.tiles) {
    for (const std::vector<cache::HeldSegment>* segments :
         {&run.settled, &run.provisional, &run.plain}) {
      for (const cache::HeldSegment& held : *segments) Add(held);
    }
  }

  std::span<const device::KeyRun> runs() const { return runs_; }

 private:
  void Add(const cache::HeldSegment& held) {
    const cache::Segment& segment = *held.segment;
    const auto tiles = tiles_.first((held.entries + kTileEntries - 1) / kTileEntries);
    tiles_ = tiles_.subspan(tiles.size());
    runs_.push_back({.entries = held.entries,
                     .tiles = tiles,
                     .strategy = {.shape = segment.shape(),
                                  .rotation = cache::ViewOf(segment.rotations(), segment.shape())},
                     .rows = RawKeys(segment, held.entries)});
  }
  // Null if the segment has no raw copies.
  const std::byte* RawKeys(const cache::Segment& segment, std::uint32_t entries) {
    if (!segment.shape().packed() || segment.raw() == nullptr) return nullptr;
    std::vector<std::byte> keys(entries * dense_.row_bytes());
    std::vector<std::byte> values(keys.size());
    if (!segment.raw()->CopyTo(entries, keys.data(), values.data())) return nullptr;
    raw_.push_back(std::move(keys));
    return raw_.back().data();
  }

  const kernels::DenseTile dense_;
  std::span<const std::byte* const> tiles_;  // of segments that are not added yet
  std::vector<std::vector<std::byte>> raw_;
  std::vector<device::KeyRun> runs_;
};

}  // namespace

std::uint64_t LayerKeys::BytesOf(std::size_t lane) const {
  return EntriesOf(runs_[lane]) * Tile().row_bytes();
}

absl::StatusOr<std::unique_ptr<device::LaneKeys>> LayerKeys::AsStored(std::size_t lane) const {
  const KeyRuns runs(runs_[lane], Tile());
  return options_.device->LoadKeys(options_.geometry, runs.runs());
}

absl::Status LayerKeys::Load(std::size_t lane) {
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> keys = AsStored(lane);
  if (keys.ok() && options_.turner.has_value()) keys = UnrotatedKeys(runs_[lane], **keys);
  if (!keys.ok()) return keys.status();
  lanes_[lane] = *std::move(keys);
  loaded_bytes_ += BytesOf(lane);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<device::LaneKeys>> LayerKeys::UnrotatedKeys(
    const cache::OpenRun& run, device::LaneKeys& keys) const {
  const kernels::DenseTile tile = Tile();
  const std::uint64_t entries = EntriesOf(run);
  std::vector<std::byte> stored(entries * tile.row_bytes());
  if (absl::Status status = keys.Read(stored.data()); !status.ok()) return status;
  const LaneEntryList seen(run);
  const std::span<const std::uint64_t> positions = seen.view().positions;
  std::vector<double> row(tile.head_dim);
  std::vector<float> turned;
  turned.reserve(entries * tile.head_dim);
  for (std::uint64_t i = 0; i < entries; ++i) {
    options_.turner->ShiftInto(stored.data() + i * tile.row_bytes(),
                               -static_cast<std::int64_t>(positions[i]), row);
    turned.insert(turned.end(), row.begin(), row.end());
  }
  kernels::LayerGeometry geometry = options_.geometry;
  geometry.type = kernels::ElementType::kFp32;
  const device::KeyRun all = {
      .entries = entries,
      .tiles = {},
      .strategy = {.shape = kernels::DenseShape(tile.head_dim, kernels::ElementType::kFp32)},
      .rows = std::as_bytes(std::span(turned)).data()};
  return options_.device->LoadKeys(geometry, {&all, 1});
}

void LayerKeys::UnloadAll() {
  for (std::unique_ptr<device::LaneKeys>& lane : lanes_) lane.reset();
  loaded_bytes_ = 0;
}

absl::Status LayerKeys::Need(std::size_t lane) {
  TESSERA_CHECK(lane < lanes_.size(), "keys of a lane that the layer has not");
  if (lanes_[lane] != nullptr) return absl::OkStatus();
  if (loaded_bytes_ + BytesOf(lane) > options_.most_bytes) UnloadAll();
  const bool alone = loaded_bytes_ == 0;
  absl::Status status = Load(lane);
  if (status.code() != absl::StatusCode::kResourceExhausted || alone) return status;
  UnloadAll();
  return Load(lane);
}

absl::Status LayerKeys::Look(std::uint32_t kv_head,
                             std::span<const kernels::KeyObservation> looks) {
  if (absl::Status status = Need(kv_head); !status.ok()) return status;
  return lanes_[kv_head]->Look(looks);
}

absl::Status LayerKeys::AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) {
  if (absl::Status status = Need(kv_head); !status.ok()) return status;
  return lanes_[kv_head]->AddSquaredLengths(sums);
}

absl::Status LayerKeys::AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                          std::span<double> sums) {
  if (options_.turner.has_value()) {
    const absl::StatusOr<std::unique_ptr<device::LaneKeys>> keys = AsStored(kv_head);
    return keys.ok() ? (*keys)->AddChannelSquares(count, sums) : keys.status();
  }
  if (absl::Status status = Need(kv_head); !status.ok()) return status;
  return lanes_[kv_head]->AddChannelSquares(count, sums);
}

}  // namespace tessera::compaction
