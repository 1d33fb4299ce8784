#include "daemon/cache/stored.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/build.h"

namespace tessera::cache {

namespace {

// Tiles that follow one another in an extent of the pool are one copy. `copy` gets the address of
// the first, its place among all tiles, and how many bytes.
template <typename TileAt>
absl::Status ForRuns(
    const pool::Pool& pool, std::size_t tiles, std::uint64_t tile_bytes, TileAt tile_at,
    const std::function<absl::Status(std::size_t first, std::uint64_t bytes)>& copy) {
  const auto extent_of = [&](std::size_t tile) {
    return static_cast<std::uint64_t>(tile_at(tile) - pool.base()) / pool.extent_bytes();
  };
  for (std::size_t first = 0; first < tiles;) {
    std::size_t end = first + 1;
    while (end < tiles && tile_at(end) == tile_at(end - 1) + tile_bytes &&
           extent_of(end) == extent_of(first)) {
      ++end;
    }
    if (absl::Status status = copy(first, (end - first) * tile_bytes); !status.ok()) return status;
    first = end;
  }
  return absl::OkStatus();
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
                 .tiles = {},
                 .tile_bytes = segment.tile_bytes() / segment.tiles(),
                 .with_rotations = false,
                 .to = nullptr};
    for (std::size_t i = 0; i < segment.tiles(); ++i) item.tiles.push_back(segment.TileData(i));
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
    bytes += item.tiles.size() * item.tile_bytes + item.from->table_bytes();
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
                      .turns_values = rotations.turns_values});
  return known;
}

absl::Status Offloading::Store(Item& item) {
  absl::StatusOr<StoredBlob> blob = Reserve(item.tiles.size() * item.tile_bytes);
  if (!blob.ok()) return blob.status();
  absl::Status status = ForRuns(
      *memory_.pool, item.tiles.size(), item.tile_bytes,
      [&](std::size_t tile) { return item.tiles[tile]; },
      [&](std::size_t first, std::uint64_t bytes) {
        return memory_.device->Read(blob->blob.data() + first * item.tile_bytes, item.tiles[first],
                                    bytes);
      });
  if (!status.ok()) return status;
  std::shared_ptr<const StoredRotations> rotations;
  if (item.with_rotations) {
    absl::StatusOr<std::shared_ptr<const StoredRotations>> stored = Store(*item.from->rotations());
    if (!stored.ok()) return stored.status();
    rotations = *std::move(stored);
  }
  auto stored = std::make_shared<const StoredTiles>(StoredTiles{.blob = *std::move(blob),
                                                                .tiles = item.tiles.size(),
                                                                .tile_bytes = item.tile_bytes,
                                                                .rotations = rotations});
  item.to = item.from->WithoutTiles(item.with_rotations ? nullptr : item.from->shared_rotations(),
                                    std::move(stored));
  return absl::OkStatus();
}

absl::Status Offloading::Run() {
  // A tier that has no room for all of it is not worth a copy, nor is the tenant's part of one.
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
                                                      .turns_values = stored.turns_values});
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
  absl::StatusOr<std::vector<pool::Block>> tiles = memory_.pool->AllocateMany(
      stored.tiles, stored.tile_bytes, pool::Fit::kExact, pool::MemoryTag::kTiles);
  if (!tiles.ok()) return tiles.status();
  absl::StatusOr<pool::Block> table = memory_.pool->Allocate(
      Segment::TableBytes(stored.tiles), pool::Fit::kRounded, pool::MemoryTag::kTables);
  if (!table.ok()) return table.status();
  bytes_ += stored.bytes() + table->bytes();
  item.to = item.from->WithoutTiles(std::move(rotations), nullptr);
  item.to->ListTableWords(*tiles, *table, words_);
  item.to->AddTiles(*std::move(tiles), *std::move(table));
  return absl::OkStatus();
}

absl::Status Restoring::FillTiles(const Item& item) {
  const StoredTiles& stored = *item.from->stored();
  return ForRuns(
      *memory_.pool, stored.tiles, stored.tile_bytes,
      [&](std::size_t tile) { return item.to->TileData(tile); },
      [&](std::size_t first, std::uint64_t bytes) {
        return memory_.device->Write(item.to->TileData(first),
                                     stored.blob.blob.data() + first * stored.tile_bytes, bytes);
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
