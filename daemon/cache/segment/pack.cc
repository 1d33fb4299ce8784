#include "daemon/cache/segment/pack.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"
#include "daemon/cache/segment/build.h"
#include "daemon/cache/segment/stored.h"

namespace tessera::cache {

using kernels::kTileEntries;

namespace {

// Tiles per device call. GoOn is polled between calls.
constexpr std::size_t kTilesAtOnce = 1024;

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
  std::shared_ptr<const Rotations> rotations;  // of the current lane
  for (std::size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    const bool next_lane =
        i == 0 || item.layer != items_[i - 1].layer || item.kv_head != items_[i - 1].kv_head;
    const kernels::RotationView matrices = MatricesOf(item.layer, item.kv_head);
    if ((matrices.key != nullptr || matrices.value != nullptr) && next_lane) {
      absl::StatusOr<std::shared_ptr<const Rotations>> reserved =
          ReserveRotations(memory_, ShapeOf(item.layer), matrices);
      if (!reserved.ok()) return reserved.status();
      rotations = *std::move(reserved);
    }
    if (absl::Status status = ReserveSegment(item, rotations); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Packer::ReserveSegment(Item& item, std::shared_ptr<const Rotations> rotations) {
  item.to = std::make_shared<Segment>(ShapeOf(item.layer), item.from->first_position(),
                                      std::move(rotations));
  return ReserveTiles(memory_, item.entries, *item.to, words_);
}

// ---- contents

kernels::RotationView Packer::MatricesOf(std::uint32_t layer, std::uint32_t kv_head) const {
  const kernels::TileShape& shape = ShapeOf(layer);
  const std::uint64_t index =
      (layer - spec_.first_layer) * model_.layout().kv_heads(layer) + kv_head;
  const auto of = [&](const std::byte* all, const kernels::RowShape& side) {
    return all == nullptr ? nullptr
                          : all + index * kernels::RotationBytes(shape, side, spec_.rotation_type);
  };
  return {.key = of(spec_.key_rotations, shape.key),
          .value = of(spec_.value_rotations, shape.value),
          .type = spec_.rotation_type};
}

absl::Status Packer::StoreRotations() {
  std::vector<RotationStore> stores;
  for (const Item& item : items_) {
    const Rotations* const rotations = item.to->rotations();
    if (rotations == nullptr || (!stores.empty() && stores.back().rotations == rotations)) continue;
    stores.push_back({.rotations = rotations,
                      .shape = ShapeOf(item.layer),
                      .matrices = MatricesOf(item.layer, item.kv_head)});
  }
  return cache::StoreRotations(memory_, stores);
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
    batch.strategies.push_back(
        {.shape = item.to->shape(), .rotation = ViewOf(item.to->rotations(), item.to->shape())});
  }
  const kernels::TileLayout rows = kernels::LayoutOf(item.from->shape());
  const std::size_t tile = first_entry / kTileEntries;
  const std::byte* const source = item.from->TileData(tile);
  batch.tiles.push_back({.key = source + rows.key_data,
                         .value = source + rows.value_data,
                         .rows = std::min(kTileEntries, item.entries - first_entry),
                         .strategy = static_cast<std::uint32_t>(batch.strategies.size() - 1),
                         .to = item.to->PlaceOf(tile)});
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

// Finds the value that does not fit. The device names only the tile, so its rows are encoded one by
// one. If each row fits alone, a block summary is the value that does not.
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
      Concat("layer ", item.layer, ", kv head ", item.kv_head, ": ", what,
             " is not finite when stored as ",
             shape.planes()   ? "planes"
             : shape.packed() ? kernels::ValueTypeName(kernels::ValuesOf(shape.format))
                              : kernels::ElementName(kernels::ElementsOf(shape.format))));
}

// ---- inspection

namespace {

// Must be called before the entries are added to `run`.
void AddLoss(const SegmentLoss& loss, std::uint64_t entries, SegmentRun& run) {
  if (entries == 0) return;
  const double share = static_cast<double>(entries) / static_cast<double>(run.entries + entries);
  run.loss.key += (loss.key - run.loss.key) * share;
  run.loss.value += (loss.value - run.loss.value) * share;
}

}  // namespace

std::vector<SegmentRun> RunsOf(const Lane& lane) {
  std::vector<SegmentRun> runs;
  const Rotations* last = nullptr;
  const StoredRotations* last_stored = nullptr;
  const Rotations* of_run = nullptr;
  const StoredRotations* stored_of_run = nullptr;
  for (const HeldSegment& held : lane.segments) {
    const Segment& segment = *held.segment;
    const SegmentRun form = {.shape = segment.shape(),
                             .provisional = segment.raw() != nullptr && !segment.raw()->dropped(),
                             .first_position = segment.first_position()};
    const StoredRotations* const stored_rotations =
        segment.stored() == nullptr ? nullptr : segment.stored()->rotations.get();
    if (runs.empty() || !runs.back().SameForm(form) || segment.rotations() != of_run ||
        stored_rotations != stored_of_run) {
      runs.push_back(form);
    }
    of_run = segment.rotations();
    stored_of_run = stored_rotations;
    SegmentRun& run = runs.back();
    // A provisional segment has no strategy of its own, so no loss either.
    if (!form.provisional) AddLoss(segment.loss(), held.entries, run);
    ++run.segments;
    run.entries += held.entries;
    run.tile_bytes += segment.tile_bytes();
    run.table_bytes += segment.table_bytes();
    run.summary_bytes += segment.summary_bytes();
    if (form.provisional) run.raw_bytes += segment.raw()->bytes();
    if (const StoredTiles* stored = segment.stored()) {
      run.stored_bytes += stored->bytes();
      if (stored_rotations != nullptr && stored_rotations != last_stored) {
        run.stored_bytes += stored_rotations->bytes();
        last_stored = stored_rotations;
      }
    }
    // Segments that share rotations are adjacent.
    if (segment.rotations() != nullptr && segment.rotations() != last) {
      run.rotation_bytes += segment.rotations()->block.bytes();
    }
    if (segment.rotations() != nullptr) last = segment.rotations();
  }
  return runs;
}

void AddRuns(const std::vector<SegmentRun>& runs, std::vector<SegmentRun>& sums) {
  for (const SegmentRun& run : runs) {
    const auto it = std::find_if(sums.begin(), sums.end(),
                                 [&](const SegmentRun& sum) { return sum.SameForm(run); });
    if (it == sums.end()) {
      sums.push_back(run);
      continue;
    }
    AddLoss(run.loss, run.entries, *it);
    it->segments += run.segments;
    it->entries += run.entries;
    it->tile_bytes += run.tile_bytes;
    it->rotation_bytes += run.rotation_bytes;
    it->table_bytes += run.table_bytes;
    it->summary_bytes += run.summary_bytes;
    it->raw_bytes += run.raw_bytes;
    it->stored_bytes += run.stored_bytes;
  }
}

}  // namespace tessera::cache
