#include "daemon/cache/segment/build.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"

namespace tessera::cache {

using kernels::kTileEntries;

namespace {

std::size_t TilesOf(std::uint64_t entries) { return (entries + kTileEntries - 1) / kTileEntries; }

// Tiles per batch when the device cannot read the daemon's memory and rows are uploaded.
constexpr std::size_t kUploadBatchTiles = 256;

// Uploads rows to dense tiles in memory that the device can read.
absl::Status Upload(const TenantMemory& memory, const HostRows& rows,
                    std::span<const device::TilePlace> tiles) {
  std::vector<device::RowRun> runs;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const std::uint64_t first = i * kTileEntries;
    const std::size_t at = first * rows.tile.row_bytes();
    runs.push_back({.key = rows.keys + at,
                    .value = rows.values + at,
                    .stride = rows.tile.row_bytes(),
                    .key_target = tiles[i].tile + rows.tile.key_offset(0),
                    .value_target = tiles[i].tile + rows.tile.value_offset(0),
                    .rows = static_cast<std::uint32_t>(
                        std::min<std::uint64_t>(kTileEntries, rows.count - first)),
                    .row_bytes = static_cast<std::uint32_t>(rows.tile.row_bytes())});
  }
  const absl::StatusOr<std::optional<device::UnusableRow>> unusable =
      memory.device->StoreRows(device::Place::kHost, rows.tile.type, runs);
  if (!unusable.ok()) return unusable.status();
  TESSERA_CHECK(!unusable->has_value(), "rows are validated before they are encoded");
  return absl::OkStatus();
}

// Where the device reads the rows of one tile, and their weights and positions.
struct Source {
  const std::byte* key;
  const std::byte* value;
  const float* weights = nullptr;
  const std::uint32_t* positions = nullptr;
};

// `source(i)` is the source of tile i; `rows` counts the rows of all tiles.
template <typename SourceOf>
absl::StatusOr<std::optional<std::size_t>> Encode(const TenantMemory& memory, const TileForm& form,
                                                  kernels::ElementType type, std::uint64_t rows,
                                                  std::span<const device::TilePlace> tiles,
                                                  SourceOf source) {
  const device::TileStrategy strategy = {
      .shape = form.shape, .rotation = ViewOf(form.rotations, form.shape), .limits = form.limits};
  std::vector<device::TileEncode> jobs;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Source from = source(i);
    jobs.push_back({.key = from.key,
                    .value = from.value,
                    .weights = from.weights,
                    .positions = from.positions,
                    .rows = static_cast<std::uint32_t>(
                        std::min<std::uint64_t>(kTileEntries, rows - i * kTileEntries)),
                    .strategy = 0,
                    .to = tiles[i]});
  }
  return memory.device->Encode({&strategy, 1}, type, jobs);
}

HostRows Slice(const HostRows& rows, std::uint64_t first, std::uint64_t count) {
  const std::size_t at = first * rows.tile.row_bytes();
  return {.keys = rows.keys + at,
          .values = rows.values + at,
          .count = count,
          .tile = rows.tile,
          .weights = rows.weights == nullptr ? nullptr : rows.weights + first,
          .positions = rows.positions == nullptr ? nullptr : rows.positions + first};
}

// Uploads weights and positions for a device that cannot read the daemon's memory. Holds as many of
// each as the tiles of one batch need.
class UploadedWords {
 public:
  static absl::StatusOr<UploadedWords> Reserve(const TenantMemory& memory, const HostRows& rows) {
    UploadedWords words;
    if (rows.weights == nullptr && rows.positions == nullptr) return words;
    absl::StatusOr<pool::Block> block =
        memory.pool->Allocate(2 * kBytes, pool::Fit::kExact, pool::MemoryTag::kTiles);
    if (!block.ok()) return block.status();
    words.block_ = *std::move(block);
    return words;
  }

  absl::Status Bring(const TenantMemory& memory, const HostRows& some) {
    std::vector<device::WordStore> stores;
    const auto bring = [&](const void* from, std::byte* to) {
      for (std::uint64_t at = 0; at < some.count * kWordBytes; at += sizeof(std::uint64_t)) {
        std::uint64_t pair = 0;
        std::memcpy(&pair, static_cast<const std::byte*>(from) + at,
                    std::min<std::uint64_t>(sizeof pair, some.count * kWordBytes - at));
        stores.push_back({to + at, pair});
      }
    };
    weights_ = some.weights == nullptr ? nullptr : block_.data();
    positions_ = some.positions == nullptr ? nullptr : block_.data() + kBytes;
    if (weights_ != nullptr) bring(some.weights, block_.data());
    if (positions_ != nullptr) bring(some.positions, block_.data() + kBytes);
    return memory.device->StoreWords(stores);
  }

  const float* weights(std::uint64_t entry) const {
    return weights_ == nullptr ? nullptr : reinterpret_cast<const float*>(weights_) + entry;
  }
  const std::uint32_t* positions(std::uint64_t entry) const {
    return positions_ == nullptr ? nullptr
                                 : reinterpret_cast<const std::uint32_t*>(positions_) + entry;
  }

 private:
  static constexpr std::uint64_t kWordBytes = 4;
  static constexpr std::uint64_t kBytes = kUploadBatchTiles * kTileEntries * kWordBytes;
  pool::Block block_;
  const std::byte* weights_ = nullptr;
  const std::byte* positions_ = nullptr;
};

// Encodes through temporary dense tiles.
absl::StatusOr<std::optional<std::size_t>> EncodeUploaded(
    const TenantMemory& memory, const TileForm& form, const HostRows& rows,
    std::span<const device::TilePlace> tiles) {
  absl::StatusOr<std::vector<pool::Block>> way =
      memory.pool->AllocateMany(std::min(tiles.size(), kUploadBatchTiles), rows.tile.bytes(),
                                pool::Fit::kExact, pool::MemoryTag::kTiles);
  if (!way.ok()) return way.status();
  absl::StatusOr<UploadedWords> words = UploadedWords::Reserve(memory, rows);
  if (!words.ok()) return words.status();
  for (std::size_t done = 0; done < tiles.size(); done += kUploadBatchTiles) {
    const std::size_t count = std::min(kUploadBatchTiles, tiles.size() - done);
    const std::uint64_t first = done * kTileEntries;
    const HostRows some =
        Slice(rows, first, std::min<std::uint64_t>(rows.count - first, count * kTileEntries));
    std::vector<device::TilePlace> stops;
    for (std::size_t i = 0; i < count; ++i) stops.push_back({.tile = (*way)[i].data()});
    absl::Status status = Upload(memory, some, stops);
    if (status.ok()) status = words->Bring(memory, some);
    if (!status.ok()) return status;
    const absl::StatusOr<std::optional<std::size_t>> unfit =
        Encode(memory, form, rows.tile.type, some.count, tiles.subspan(done, count),
               [&](std::size_t i) -> Source {
                 return {.key = stops[i].tile + rows.tile.key_offset(0),
                         .value = stops[i].tile + rows.tile.value_offset(0),
                         .weights = words->weights(i * kTileEntries),
                         .positions = words->positions(i * kTileEntries)};
               });
    if (!unfit.ok()) return unfit.status();
    if (unfit->has_value()) return done + **unfit;
  }
  return std::nullopt;
}

}  // namespace

// ---- rotations

absl::StatusOr<pool::Block> AllocateRotations(const TenantMemory& memory, std::uint64_t bytes) {
  const auto allocate = [&] {
    return memory.pool->Allocate(bytes, pool::Fit::kExact, pool::MemoryTag::kRotations);
  };
  absl::StatusOr<pool::Block> block = allocate();
  if (!block.ok() || block->offset() != 0) return block;
  // Allocate another block while this one occupies offset 0.
  return allocate();
}

absl::StatusOr<std::shared_ptr<const Rotations>> ReserveRotations(
    const TenantMemory& memory, const kernels::TileShape& shape,
    const kernels::RotationView& matrices) {
  const auto bytes_of = [&](const std::byte* matrix, const kernels::RowShape& side) {
    return matrix == nullptr ? 0 : kernels::RotationBytes(shape, side, matrices.type);
  };
  const std::uint64_t bytes =
      bytes_of(matrices.key, shape.key) + bytes_of(matrices.value, shape.value);
  absl::StatusOr<pool::Block> block = AllocateRotations(memory, bytes);
  if (!block.ok()) return block.status();
  return std::make_shared<const Rotations>(Rotations{.block = *std::move(block),
                                                     .type = matrices.type,
                                                     .turns_keys = matrices.key != nullptr,
                                                     .turns_values = matrices.value != nullptr});
}

namespace {

// Lists the rows of one side's matrix, if it has one, and advances `to` past it.
void ListMatrix(const std::byte* matrix, const kernels::TileShape& shape,
                const kernels::RowShape& side, kernels::ElementType type, std::byte*& to,
                std::vector<device::RowRun>& runs) {
  if (matrix == nullptr) return;
  const auto row_bytes = static_cast<std::uint32_t>(shape.head_dim * kernels::ElementBytes(type));
  for (std::uint32_t row = 0; row < side.channels; row += kTileEntries) {
    const std::uint64_t at = std::uint64_t{row} * row_bytes;
    runs.push_back({.key = matrix + at,
                    .value = nullptr,
                    .stride = row_bytes,
                    .key_target = to + at,
                    .value_target = nullptr,
                    .rows = std::min(kTileEntries, side.channels - row),
                    .row_bytes = row_bytes});
  }
  to += kernels::RotationBytes(shape, side, type);
}

}  // namespace

absl::Status StoreRotations(const TenantMemory& memory, std::span<const RotationStore> stores) {
  if (stores.empty()) return absl::OkStatus();
  const kernels::ElementType type = stores.front().rotations->type;
  std::vector<device::RowRun> runs;
  for (const RotationStore& store : stores) {
    TESSERA_CHECK(store.rotations->type == type, "rotations stored together have one type");
    std::byte* to = store.rotations->block.data();
    ListMatrix(store.matrices.key, store.shape, store.shape.key, type, to, runs);
    ListMatrix(store.matrices.value, store.shape, store.shape.value, type, to, runs);
  }
  const absl::StatusOr<std::optional<device::UnusableRow>> unusable =
      memory.device->StoreRows(device::Place::kHost, type, runs);
  if (!unusable.ok()) return unusable.status();
  if (!unusable->has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError("a rotation matrix contains a value that is not finite");
}

absl::StatusOr<std::shared_ptr<const Rotations>> StoreBook(const TenantMemory& memory,
                                                           std::span<const std::byte> book) {
  absl::StatusOr<pool::Block> block = AllocateRotations(memory, book.size());
  if (!block.ok()) return block.status();
  absl::Status status = memory.device->Write(block->data(), book.data(), book.size());
  if (!status.ok()) return status;
  return std::make_shared<const Rotations>(
      Rotations{.block = *std::move(block), .type = kernels::ElementType::kBf16, .is_book = true});
}

kernels::RotationView ViewOf(const Rotations* rotations, const kernels::TileShape& shape) {
  if (rotations == nullptr) return {};
  if (rotations->is_book) return kernels::BookAt(rotations->block.data(), shape.head_dim);
  kernels::RotationView view = {.type = rotations->type};
  const std::byte* at = rotations->block.data();
  if (rotations->turns_keys) {
    view.key = at;
    at += kernels::RotationBytes(shape, shape.key, rotations->type);
  }
  if (rotations->turns_values) view.value = at;
  return view;
}

// ---- tiles

absl::Status ReserveTiles(const TenantMemory& memory, std::uint32_t entries, Segment& segment,
                          std::vector<device::WordStore>& words) {
  const std::size_t count = TilesOf(entries);
  absl::StatusOr<Tiles> tiles = Tiles::Allocate(*memory.pool, segment.shape(), count);
  if (!tiles.ok()) return tiles.status();
  absl::StatusOr<pool::Block> table = memory.pool->Allocate(
      segment.TableBytes(count), pool::Fit::kRounded, pool::MemoryTag::kTables);
  if (!table.ok()) return table.status();
  segment.ListTableWords(*tiles, *table, words);
  segment.AddTiles(*std::move(tiles), *std::move(table));
  segment.set_filled(entries);
  return absl::OkStatus();
}

absl::StatusOr<SegmentGrowth> ReserveGrowth(const TenantMemory& memory,
                                            const std::shared_ptr<Segment>& segment,
                                            std::size_t tiles,
                                            std::vector<device::WordStore>& words) {
  SegmentGrowth growth = {.segment = segment, .tiles = {}, .table = {}};
  absl::StatusOr<Tiles> more = Tiles::Allocate(*memory.pool, segment->shape(), tiles);
  if (!more.ok()) return more.status();
  growth.tiles = *std::move(more);
  const std::size_t all = segment->tiles() + tiles;
  if (!segment->TableHolds(all)) {
    absl::StatusOr<pool::Block> table = memory.pool->Allocate(
        segment->TableBytes(all), pool::Fit::kRounded, pool::MemoryTag::kTables);
    if (!table.ok()) return table.status();
    growth.table = *std::move(table);
  }
  segment->ListTableWords(growth.tiles, growth.table, words);
  return growth;
}

absl::StatusOr<std::optional<std::size_t>> EncodeRows(const TenantMemory& memory,
                                                      const TileForm& form, const HostRows& rows,
                                                      std::span<const device::TilePlace> tiles) {
  TESSERA_CHECK(tiles.size() == TilesOf(rows.count), "there is one tile per 32 rows");
  if (form.shape == kernels::DenseShape(rows.tile.head_dim, rows.tile.type)) {
    if (absl::Status status = Upload(memory, rows, tiles); !status.ok()) return status;
    return std::nullopt;
  }
  if (memory.device->description().reads_host_memory) {
    return Encode(memory, form, rows.tile.type, rows.count, tiles, [&](std::size_t i) -> Source {
      const HostRows some = Slice(rows, i * kTileEntries, 0);
      return {some.keys, some.values, some.weights, some.positions};
    });
  }
  return EncodeUploaded(memory, form, rows, tiles);
}

absl::Status GatherRows(const TenantMemory& memory, const kernels::TileShape& from,
                        std::span<const kernels::GatherRow> rows, const Segment& to) {
  std::vector<device::TileGather> tiles;
  for (std::size_t done = 0; done < rows.size(); done += kTileEntries) {
    const std::size_t some = std::min<std::size_t>(kTileEntries, rows.size() - done);
    tiles.push_back({.rows = rows.subspan(done, some), .to = to.PlaceOf(done / kTileEntries)});
  }
  return memory.device->Gather(from, to.shape(), tiles);
}

absl::StatusOr<std::shared_ptr<Segment>> CopyEntries(const TenantMemory& memory,
                                                     const Segment& from, std::uint32_t first,
                                                     std::uint32_t end) {
  TESSERA_CHECK(first < end && from.entry_list() == nullptr,
                "the range is not empty and has one entry per token");
  auto copy =
      std::make_shared<Segment>(from.shape(), from.PositionOf(first), from.shared_rotations());
  copy->set_loss(from.loss());
  if (!from.appendable()) copy->SealDense();
  std::vector<kernels::GatherRow> rows;
  for (std::uint32_t entry = first; entry < end; ++entry) {
    rows.push_back({.tile = from.TileData(entry / kTileEntries),
                    .row = entry % kTileEntries,
                    .position = entry - first,
                    .summaries = from.PlaceOf(entry / kTileEntries).summaries});
  }
  std::vector<device::WordStore> words;
  absl::Status status = ReserveTiles(memory, end - first, *copy, words);
  if (status.ok()) status = GatherRows(memory, from.shape(), rows, *copy);
  if (status.ok()) status = memory.device->StoreWords(words);
  if (!status.ok()) return status;
  return copy;
}

absl::Status ReadDense(const TenantMemory& memory, const HeldSegment& held,
                       const kernels::DenseTile& tile, std::byte* keys, std::byte* values) {
  for (std::uint32_t entry = 0; entry < held.entries; entry += kTileEntries) {
    const std::size_t bytes = std::min(kTileEntries, held.entries - entry) * tile.row_bytes();
    const std::size_t at = entry * tile.row_bytes();
    const std::byte* const from = held.segment->TileData(entry / kTileEntries);
    absl::Status status = memory.device->Read(keys + at, from + tile.key_offset(0), bytes);
    if (status.ok()) {
      status = memory.device->Read(values + at, from + tile.value_offset(0), bytes);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tessera::cache
