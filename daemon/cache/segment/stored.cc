#include "daemon/cache/segment/stored.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/segment/build.h"

namespace tessera::cache {

namespace {

// Copies between `bytes` at `pool` and the offset `in_blob` in the blob, in one direction or the
// other.
using Copy =
    std::function<absl::Status(std::byte* pool, std::uint64_t in_blob, std::uint64_t bytes)>;

// Copies objects that are adjacent in one pool extent with a single call. In the blob, all objects
// are adjacent, starting at `in_blob`.
template <typename At>
absl::Status CopyRuns(const pool::Pool& pool, std::size_t count, std::uint64_t bytes,
                      std::uint64_t in_blob, At at, const Copy& copy) {
  const auto extent_of = [&](std::size_t index) {
    return static_cast<std::uint64_t>(at(index) - pool.base()) / pool.extent_bytes();
  };
  for (std::size_t first = 0; first < count;) {
    std::size_t end = first + 1;
    while (end < count && at(end) == at(end - 1) + bytes && extent_of(end) == extent_of(first)) {
      ++end;
    }
    absl::Status status = copy(at(first), in_blob + first * bytes, (end - first) * bytes);
    if (!status.ok()) return status;
    first = end;
  }
  return absl::OkStatus();
}

// Bytes to copy per tile, and per tile's summaries.
struct Strides {
  std::uint64_t tile;
  std::uint64_t summaries;
  std::uint64_t both() const { return tile + summaries; }
};

Strides StridesOf(const kernels::TileShape& shape) {
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  return {.tile = pool::Slabs::RoundUp(layout.bytes, pool::Fit::kExact),
          .summaries = layout.summary_bytes};
}

// `place(i)` locates tile i and its summaries in the pool.
template <typename PlaceOf>
absl::Status CopyTiles(const pool::Pool& pool, std::size_t tiles, const Strides& strides,
                       PlaceOf place, const Copy& copy) {
  absl::Status status = CopyRuns(
      pool, tiles, strides.tile, 0, [&](std::size_t i) { return place(i).tile; }, copy);
  if (!status.ok() || strides.summaries == 0) return status;
  return CopyRuns(
      pool, tiles, strides.summaries, tiles * strides.tile,
      [&](std::size_t i) { return place(i).summaries; }, copy);
}

}  // namespace

// ---- out

void Offloading::Take(const Lane& lane) {
  absl::flat_hash_map<const Rotations*, long> holders;
  const std::size_t first = items_.size();
  for (const HeldSegment& held : lane.segments) {
    const Segment& segment = *held.segment;
    if (segment.stored() != nullptr || segment.tiles() == 0 || held.segment.use_count() != 1) {
      continue;
    }
    Item item = {.from = held.segment,
                 .tiles = segment.Places(),
                 .pool_bytes = segment.tile_bytes(),
                 .with_rotations = false,
                 .to = nullptr};
    if (segment.rotations() != nullptr) ++holders[segment.rotations()];
    by_source_[&segment] = items_.size();
    items_.push_back(std::move(item));
  }
  for (std::size_t i = first; i < items_.size(); ++i) {
    const std::shared_ptr<const Rotations>& rotations = items_[i].from->shared_rotations();
    items_[i].with_rotations =
        rotations != nullptr && rotations.use_count() == holders[rotations.get()];
  }
}

std::uint64_t Offloading::bytes() const {
  std::uint64_t bytes = 0;
  absl::flat_hash_map<const Rotations*, std::uint64_t> rotations;
  for (const Item& item : items_) {
    bytes += item.pool_bytes + item.from->table_bytes();
    if (item.with_rotations) {
      rotations[item.from->rotations()] = item.from->rotations()->block.bytes();
    }
  }
  for (const auto& [pointer, size] : rotations) bytes += size;
  return bytes;
}

absl::StatusOr<StoredBlob> Offloading::Reserve(std::uint64_t bytes) const {
  absl::StatusOr<pool::Charge> charge =
      memory_.offloaded->Reserve(pool::MemoryTag::kOffloaded, bytes);
  if (!charge.ok()) return charge.status();
  absl::StatusOr<tiers::Blob> blob = memory_.host_tier->Reserve(bytes);
  if (!blob.ok()) return blob.status();
  return StoredBlob{*std::move(blob), *std::move(charge)};
}

absl::StatusOr<std::shared_ptr<const StoredRotations>> Offloading::Store(
    const Rotations& rotations) {
  std::shared_ptr<const StoredRotations>& known = rotations_[&rotations];
  if (known != nullptr) return known;
  absl::StatusOr<StoredBlob> blob = Reserve(rotations.block.bytes());
  if (!blob.ok()) return blob.status();
  absl::Status status =
      memory_.device->Read(blob->blob.data(), rotations.block.data(), rotations.block.bytes());
  if (!status.ok()) return status;
  known = std::make_shared<const StoredRotations>(
      StoredRotations{.blob = *std::move(blob),
                      .type = rotations.type,
                      .turns_keys = rotations.turns_keys,
                      .turns_values = rotations.turns_values,
                      .is_book = rotations.is_book});
  return known;
}

absl::Status Offloading::Store(Item& item) {
  const Strides strides = StridesOf(item.from->shape());
  absl::StatusOr<StoredBlob> blob = Reserve(item.tiles.size() * strides.both());
  if (!blob.ok()) return blob.status();
  absl::Status status = CopyTiles(
      *memory_.pool, item.tiles.size(), strides, [&](std::size_t i) { return item.tiles[i]; },
      [&](std::byte* pool, std::uint64_t in_blob, std::uint64_t bytes) {
        return memory_.device->Read(blob->blob.data() + in_blob, pool, bytes);
      });
  if (!status.ok()) return status;
  std::shared_ptr<const StoredRotations> rotations;
  if (item.with_rotations) {
    absl::StatusOr<std::shared_ptr<const StoredRotations>> stored = Store(*item.from->rotations());
    if (!stored.ok()) return stored.status();
    rotations = *std::move(stored);
  }
  auto stored = std::make_shared<const StoredTiles>(
      StoredTiles{.blob = *std::move(blob), .tiles = item.tiles.size(), .rotations = rotations});
  item.to = item.from->WithoutTiles(item.with_rotations ? nullptr : item.from->shared_rotations(),
                                    std::move(stored));
  return absl::OkStatus();
}

absl::Status Offloading::Run() {
  // Refuse before copying if the tier or the tenant's share of it lacks room for everything.
  const std::uint64_t needed = bytes();
  if (needed > memory_.host_tier->free_bytes()) {
    return memory_.host_tier->Reserve(needed).status();
  }
  absl::StatusOr<pool::Charge> fits =
      memory_.offloaded->Reserve(pool::MemoryTag::kOffloaded, needed);
  if (!fits.ok()) return fits.status();
  fits->Reset();
  for (Item& item : items_) {
    if (absl::Status status = Store(item); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::shared_ptr<Segment> Offloading::Find(const Segment& segment) const {
  const auto it = by_source_.find(&segment);
  return it == by_source_.end() ? nullptr : items_[it->second].to;
}

void Offloading::ReleaseSources() {
  for (Item& item : items_) item.from = nullptr;
}

// ---- back

void Restoring::Take(const Lane& lane) {
  for (const HeldSegment& held : lane.segments) {
    if (held.segment->stored() == nullptr) continue;
    by_source_[held.segment.get()] = items_.size();
    items_.push_back({held.segment, nullptr});
  }
}

absl::StatusOr<std::shared_ptr<const Rotations>> Restoring::Reserve(const StoredRotations& stored) {
  std::shared_ptr<const Rotations>& known = rotations_[&stored];
  if (known != nullptr) return known;
  absl::StatusOr<pool::Block> block = AllocateRotations(memory_, stored.bytes());
  if (!block.ok()) return block.status();
  bytes_ += block->bytes();
  known = std::make_shared<const Rotations>(Rotations{.block = *std::move(block),
                                                      .type = stored.type,
                                                      .turns_keys = stored.turns_keys,
                                                      .turns_values = stored.turns_values,
                                                      .is_book = stored.is_book});
  return known;
}

absl::Status Restoring::Reserve(Item& item) {
  const StoredTiles& stored = *item.from->stored();
  std::shared_ptr<const Rotations> rotations = item.from->shared_rotations();
  if (stored.rotations != nullptr) {
    absl::StatusOr<std::shared_ptr<const Rotations>> reserved = Reserve(*stored.rotations);
    if (!reserved.ok()) return reserved.status();
    rotations = *std::move(reserved);
  }
  absl::StatusOr<Tiles> tiles = Tiles::Allocate(*memory_.pool, item.from->shape(), stored.tiles);
  if (!tiles.ok()) return tiles.status();
  absl::StatusOr<pool::Block> table = memory_.pool->Allocate(
      item.from->TableBytes(stored.tiles), pool::Fit::kRounded, pool::MemoryTag::kTables);
  if (!table.ok()) return table.status();
  bytes_ += tiles->pool_bytes() + table->bytes();
  item.to = item.from->WithoutTiles(std::move(rotations), nullptr);
  item.to->ListTableWords(*tiles, *table, words_);
  item.to->AddTiles(*std::move(tiles), *std::move(table));
  return absl::OkStatus();
}

absl::Status Restoring::FillTiles(const Item& item) {
  const StoredTiles& stored = *item.from->stored();
  return CopyTiles(
      *memory_.pool, stored.tiles, StridesOf(item.to->shape()),
      [&](std::size_t i) { return item.to->PlaceOf(i); },
      [&](std::byte* pool, std::uint64_t in_blob, std::uint64_t bytes) {
        return memory_.device->Write(pool, stored.blob.blob.data() + in_blob, bytes);
      });
}

absl::Status Restoring::Fill() {
  for (const auto& [stored, rotations] : rotations_) {
    absl::Status status =
        memory_.device->Write(rotations->block.data(), stored->blob.blob.data(), stored->bytes());
    if (!status.ok()) return status;
  }
  for (const Item& item : items_) {
    if (absl::Status status = FillTiles(item); !status.ok()) return status;
  }
  return memory_.device->StoreWords(words_);
}

absl::Status Restoring::Run() {
  for (Item& item : items_) {
    if (absl::Status status = Reserve(item); !status.ok()) return status;
  }
  return Fill();
}

std::shared_ptr<Segment> Restoring::Find(const Segment& segment) const {
  const auto it = by_source_.find(&segment);
  return it == by_source_.end() ? nullptr : items_[it->second].to;
}

}  // namespace tessera::cache
