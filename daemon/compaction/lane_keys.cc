#include "daemon/compaction/lane_keys.h"

#include <algorithm>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/cache/build.h"
#include "kernels/format/element.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::compaction {

using kernels::kTileEntries;

namespace {

void Narrow(const float* from, std::uint32_t count, kernels::ElementType type, std::byte* to) {
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint16_t bits = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(from[i])
                                                                   : kernels::FloatToFp16(from[i]);
    std::memcpy(to + i * sizeof bits, &bits, sizeof bits);
  }
}

}  // namespace

absl::StatusOr<LaneKeys> LaneKeys::Of(const Options& options, const cache::OpenRun& run) {
  LaneKeys keys(options, run.tiles);
  for (const std::vector<cache::HeldSegment>* segments :
       {&run.settled, &run.provisional, &run.plain}) {
    for (const cache::HeldSegment& held : *segments) {
      if (absl::Status status = keys.Add(held); !status.ok()) return status;
    }
  }
  if (!keys.weights_.empty()) keys.weights_.resize(keys.positions_.size(), 1.0f);
  return keys;
}

absl::Status LaneKeys::Add(const cache::HeldSegment& held) {
  const std::span<const std::byte* const> tiles =
      tiles_.first((held.entries + kTileEntries - 1) / kTileEntries);
  tiles_ = tiles_.subspan(tiles.size());
  const cache::Segment& segment = *held.segment;
  const cache::EntryList* const list = segment.entry_list();
  if (list != nullptr && !list->weights.empty()) {
    weights_.resize(positions_.size(), 1.0f);
    weights_.insert(weights_.end(), list->weights.begin(), list->weights.begin() + held.entries);
  }
  for (std::uint32_t entry = 0; entry < held.entries; ++entry) {
    positions_.push_back(segment.PositionOf(entry));
  }
  if (!options_.keys) return absl::OkStatus();
  const std::size_t row_bytes = options_.tile.row_bytes();
  const std::size_t before = keys_.size();
  keys_.resize(before + held.entries * row_bytes);
  std::byte* const keys = keys_.data() + before;
  if (!segment.shape().packed()) return AddDense(held, tiles, keys);
  if (segment.raw() != nullptr) {
    std::vector<std::byte> values(held.entries * row_bytes);
    if (segment.raw()->CopyTo(held.entries, keys, values.data())) return absl::OkStatus();
  }
  return AddPacked(held, tiles, keys);
}

absl::Status LaneKeys::AddDense(const cache::HeldSegment& held,
                                std::span<const std::byte* const> tiles, std::byte* keys) const {
  const std::size_t row_bytes = options_.tile.row_bytes();
  for (std::uint32_t entry = 0; entry < held.entries; entry += kTileEntries) {
    absl::Status status = options_.memory->device->Read(
        keys + entry * row_bytes, tiles[entry / kTileEntries] + options_.tile.key_offset(0),
        std::min(kTileEntries, held.entries - entry) * row_bytes);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LaneKeys::AddPacked(const cache::HeldSegment& held,
                                 std::span<const std::byte* const> tiles, std::byte* keys) const {
  const kernels::TileShape& shape = held.segment->shape();
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  const std::uint32_t padded = kernels::PaddedChannels(shape);
  const kernels::RotationView stored = cache::ViewOf(held.segment->rotations(), shape);
  kernels::AlignedBytes rotation;
  if (stored.key != nullptr) {
    rotation.resize(kernels::RotationBytes(shape, shape.key, stored.type));
    absl::Status status =
        options_.memory->device->Read(rotation.data(), stored.key, rotation.size());
    if (!status.ok()) return status;
  }
  kernels::AlignedBytes tile(layout.bytes);
  kernels::AlignedBytes rows(2 * std::size_t{kTileEntries} * padded * sizeof(float));
  auto* const decoded = reinterpret_cast<float*>(rows.data());
  std::vector<float> turned(std::size_t{kTileEntries} * shape.head_dim);
  for (std::uint32_t entry = 0; entry < held.entries; entry += kTileEntries) {
    const std::uint32_t count = std::min(kTileEntries, held.entries - entry);
    absl::Status status =
        options_.memory->device->Read(tile.data(), tiles[entry / kTileEntries], layout.bytes);
    if (!status.ok()) return status;
    options_.operations->decode({.tile = tile.data(),
                                 .shape = shape,
                                 .layout = layout,
                                 .rows = count,
                                 .padded_channels = padded,
                                 .keys = decoded,
                                 .values = decoded + std::size_t{kTileEntries} * padded});
    options_.operations->unrotate({.rotation = stored.key == nullptr ? nullptr : rotation.data(),
                                   .rotation_type = stored.type,
                                   .channels = shape.key.channels,
                                   .head_dim = shape.head_dim,
                                   .rows = decoded,
                                   .padded_channels = padded,
                                   .row_count = count,
                                   .output = turned.data()});
    Narrow(turned.data(), count * shape.head_dim, options_.tile.type,
           keys + entry * options_.tile.row_bytes());
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
