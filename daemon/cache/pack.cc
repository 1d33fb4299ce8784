#include "daemon/cache/pack.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

using kernels::kTileEntries;

namespace {

// Tiles that the device encodes at once: in between somebody may have lost interest.
constexpr std::size_t kTilesAtOnce = 1024;

std::size_t TilesOf(std::uint32_t entries) { return (entries + kTileEntries - 1) / kTileEntries; }

}  // namespace

bool Packer::Wants(std::uint32_t layer, const Segment& segment) const {
  const kernels::TileShape& shape = segment.shape();
  return !shape.packed() && !shape.weights && !shape.positions && shape != ShapeOf(layer);
}

void Packer::Add(std::uint32_t layer, std::uint32_t kv_head, const HeldSegment& held) {
  by_source_[held.segment.get()] = items_.size();
  items_.push_back({layer, kv_head, held.segment, held.entries, nullptr});
}

absl::Status Packer::Run(const GoOn& go_on) {
  absl::Status status = Reserve();
  if (status.ok()) status = StoreRotations();
  if (status.ok()) status = Fill(go_on);
  if (status.ok()) status = memory_.device->StoreWords(words_);
  return status;
}

std::shared_ptr<Segment> Packer::Find(const Segment& segment) const {
  const auto it = by_source_.find(&segment);
  return it == by_source_.end() ? nullptr : items_[it->second].to;
}

void Packer::ReleaseSources() {
  by_source_.clear();
  for (Item& item : items_) item.from = nullptr;
}

// ---- memory

absl::Status Packer::Reserve() {
  std::shared_ptr<const Rotations> rotations;  // of the lane
  for (std::size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    const bool next_lane =
        i == 0 || item.layer != items_[i - 1].layer || item.kv_head != items_[i - 1].kv_head;
    if (spec_.key_rotations != nullptr && next_lane) {
      absl::StatusOr<std::shared_ptr<const Rotations>> reserved = ReserveRotations(item.layer);
      if (!reserved.ok()) return reserved.status();
      rotations = *std::move(reserved);
    }
    if (absl::Status status = ReserveSegment(item, rotations); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Rotations>> Packer::ReserveRotations(std::uint32_t layer) {
  const std::uint64_t bytes = 2 * kernels::RotationBytes(ShapeOf(layer), spec_.rotation_type);
  const auto allocate = [&] {
    return memory_.pool->Allocate(bytes, pool::Fit::kExact, pool::MemoryTag::kRotations);
  };
  absl::StatusOr<pool::Block> block = allocate();
  // Offset 0 says "no rotations" in a snapshot: another block, while this one holds the place.
  if (block.ok() && block->offset() == 0) {
    absl::StatusOr<pool::Block> elsewhere = allocate();
    block = std::move(elsewhere);
  }
  if (!block.ok()) return block.status();
  return std::make_shared<const Rotations>(Rotations{*std::move(block), spec_.rotation_type});
}

absl::Status Packer::ReserveSegment(Item& item, std::shared_ptr<const Rotations> rotations) {
  const kernels::TileShape& shape = ShapeOf(item.layer);
  const std::size_t count = TilesOf(item.entries);
  absl::StatusOr<std::vector<pool::Block>> tiles = memory_.pool->AllocateMany(
      count, kernels::LayoutOf(shape).bytes, pool::Fit::kExact, pool::MemoryTag::kTiles);
  if (!tiles.ok()) return tiles.status();
  absl::StatusOr<pool::Block> table = memory_.pool->Allocate(
      Segment::TableBytes(count), pool::Fit::kRounded, pool::MemoryTag::kTables);
  if (!table.ok()) return table.status();
  item.to = std::make_shared<Segment>(shape, item.from->first_position(), std::move(rotations));
  item.to->ListTableWords(*tiles, *table, words_);
  item.to->AddTiles(*std::move(tiles), *std::move(table));
  item.to->set_filled(item.entries);
  return absl::OkStatus();
}

// ---- contents

absl::Status Packer::StoreRotations() {
  std::vector<device::RowRun> runs;
  const Rotations* stored = nullptr;
  for (const Item& item : items_) {
    const Rotations* const rotations = item.to->rotations();
    if (rotations == nullptr || rotations == stored) continue;
    stored = rotations;
    const kernels::TileShape& shape = ShapeOf(item.layer);
    const auto row_bytes =
        static_cast<std::uint32_t>(shape.head_dim * kernels::ElementBytes(rotations->type));
    const std::uint64_t matrix = std::uint64_t{shape.channels} * row_bytes;
    const std::uint64_t from =
        matrix *
        ((item.layer - spec_.first_layer) * model_.layout().kv_heads(item.layer) + item.kv_head);
    std::byte* const to = rotations->block.data();
    for (std::uint32_t row = 0; row < shape.channels; row += kTileEntries) {
      const std::uint64_t at = std::uint64_t{row} * row_bytes;
      runs.push_back({.key = spec_.key_rotations + from + at,
                      .value = spec_.value_rotations + from + at,
                      .stride = row_bytes,
                      .key_target = to + at,
                      .value_target = to + kernels::RotationBytes(shape, rotations->type) + at,
                      .rows = std::min(kTileEntries, shape.channels - row),
                      .row_bytes = row_bytes});
    }
  }
  const absl::StatusOr<std::optional<device::UnusableRow>> unusable =
      memory_.device->StoreRows(device::Place::kHost, spec_.rotation_type, runs);
  if (!unusable.ok()) return unusable.status();
  if (!unusable->has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError("a rotation holds a value that is not finite");
}

absl::Status Packer::Fill(const GoOn& go_on) {
  Batch batch;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    for (std::uint32_t entry = 0; entry < items_[i].entries; entry += kTileEntries) {
      AddTile(i, entry, batch);
      if (batch.tiles.size() < kTilesAtOnce) continue;
      if (absl::Status status = Flush(go_on, batch); !status.ok()) return status;
    }
  }
  return Flush(go_on, batch);
}

void Packer::AddTile(std::size_t index, std::uint32_t first_entry, Batch& batch) const {
  const Item& item = items_[index];
  if (batch.origins.empty() || batch.origins.back().item != index) {
    device::TileStrategy strategy = {.shape = item.to->shape(), .rotation = {}};
    if (const Rotations* rotations = item.to->rotations()) {
      const std::byte* const key = rotations->block.data();
      strategy.rotation = {.key = key,
                           .value = key + kernels::RotationBytes(strategy.shape, rotations->type),
                           .type = rotations->type};
    }
    batch.strategies.push_back(strategy);
  }
  const kernels::TileLayout rows = kernels::LayoutOf(item.from->shape());
  const std::size_t tile = first_entry / kTileEntries;
  const std::byte* const source = item.from->TileData(tile);
  batch.tiles.push_back({.key = source + rows.key_data,
                         .value = source + rows.value_data,
                         .rows = std::min(kTileEntries, item.entries - first_entry),
                         .strategy = static_cast<std::uint32_t>(batch.strategies.size() - 1),
                         .tile = item.to->TileData(tile)});
  batch.origins.push_back({index, first_entry});
}

absl::Status Packer::Flush(const GoOn& go_on, Batch& batch) {
  if (absl::Status status = go_on(); !status.ok()) return status;
  const absl::StatusOr<std::optional<std::size_t>> unfit =
      memory_.device->Encode(batch.strategies, model_.spec().type, batch.tiles);
  if (!unfit.ok()) return unfit.status();
  if (unfit->has_value()) return NameUnfit(batch, **unfit);
  batch = Batch();
  return absl::OkStatus();
}

// The device names the tile: which of its rows it is, the rows tell one by one. Where each of them
// fits alone, it is a block's summary that does not.
absl::Status Packer::NameUnfit(const Batch& batch, std::size_t tile) {
  const Origin& origin = batch.origins[tile];
  const Item& item = items_[origin.item];
  const device::TileEncode& all = batch.tiles[tile];
  const std::size_t row_bytes =
      item.to->shape().head_dim * kernels::ElementBytes(model_.spec().type);
  const std::uint64_t first = item.from->first_position() + origin.first_entry;
  std::string what = Concat("a summary of tokens ", first, " to ", first + all.rows - 1);
  for (std::uint32_t row = 0; row < all.rows; ++row) {
    device::TileEncode one = all;
    one.key += row * row_bytes;
    one.value += row * row_bytes;
    one.rows = 1;
    const absl::StatusOr<std::optional<std::size_t>> unfit =
        memory_.device->Encode(batch.strategies, model_.spec().type, {&one, 1});
    if (!unfit.ok()) return unfit.status();
    if (!unfit->has_value()) continue;
    what = Concat("K or V of token ", first + row);
    break;
  }
  const kernels::TileShape& shape = item.to->shape();
  return absl::InvalidArgumentError(
      Concat("layer ", item.layer, ", kv head ", item.kv_head, ": ", what, " is not finite as ",
             shape.packed() ? kernels::ValueTypeName(kernels::ValuesOf(shape.format))
                            : kernels::ElementName(kernels::ElementsOf(shape.format))));
}

// ---- looking

std::vector<SegmentRun> RunsOf(const Lane& lane) {
  std::vector<SegmentRun> runs;
  const Rotations* last = nullptr;
  for (const HeldSegment& held : lane.segments) {
    const Segment& segment = *held.segment;
    if (runs.empty() || runs.back().shape != segment.shape()) {
      runs.push_back({.shape = segment.shape()});
    }
    SegmentRun& run = runs.back();
    ++run.segments;
    run.entries += held.entries;
    run.tile_bytes += segment.tile_bytes();
    // Those who share rotations follow one another.
    if (segment.rotations() != nullptr && segment.rotations() != last) {
      run.rotation_bytes += segment.rotations()->block.bytes();
    }
    last = segment.rotations();
  }
  return runs;
}

void AddRuns(const std::vector<SegmentRun>& runs, std::vector<SegmentRun>& sums) {
  for (const SegmentRun& run : runs) {
    const auto it = std::find_if(sums.begin(), sums.end(),
                                 [&](const SegmentRun& sum) { return sum.shape == run.shape; });
    if (it == sums.end()) {
      sums.push_back(run);
      continue;
    }
    it->segments += run.segments;
    it->entries += run.entries;
    it->tile_bytes += run.tile_bytes;
    it->rotation_bytes += run.rotation_bytes;
  }
}

}  // namespace tessera::cache
