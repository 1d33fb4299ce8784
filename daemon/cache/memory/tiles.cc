#include "daemon/cache/memory/tiles.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::cache {

namespace {

// Large enough to be read as a stream. Whole pieces of one shape are mostly adjacent in the pool.
constexpr std::uint64_t kPieceBytes = 16 * 1024;
// A remainder smaller than a whole piece is cut into pieces of 8 tiles, then into single tiles.
// Every size in use occupies a slab in each tenant's pool, so there are only three. No piece is
// rounded up, and each size is a multiple of the next, so freed small pieces add up to a larger
// one.
constexpr std::size_t kTilesOfSmallPiece = 8;

std::size_t TilesOfWholePiece(const kernels::TileLayout& layout) {
  const std::size_t most = std::max<std::uint64_t>(1, kPieceBytes / layout.summary_bytes);
  return most < kTilesOfSmallPiece ? most : most - most % kTilesOfSmallPiece;
}

// Calls piece(tile count) for each piece that `count` tiles are cut into, in order.
template <typename Piece>
void ForEachPiece(const kernels::TileLayout& layout, std::size_t count, Piece piece) {
  const std::size_t whole = TilesOfWholePiece(layout);
  for (const std::size_t tiles : {whole, std::min(whole, kTilesOfSmallPiece), std::size_t{1}}) {
    for (; count >= tiles; count -= tiles) piece(tiles);
  }
}

}  // namespace

absl::StatusOr<Tiles> Tiles::Allocate(pool::Pool& pool, const kernels::TileShape& shape,
                                      std::size_t count) {
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  Tiles all;
  absl::StatusOr<std::vector<pool::Block>> tiles =
      pool.AllocateMany(count, layout.bytes, pool::Fit::kExact, pool::MemoryTag::kTiles);
  if (!tiles.ok()) return tiles.status();
  all.tiles_ = *std::move(tiles);
  for (const pool::Block& tile : all.tiles_) all.pool_bytes_ += tile.bytes();
  if (layout.summary_bytes == 0) return all;
  absl::Status status;
  ForEachPiece(layout, count, [&](std::size_t some) {
    if (status.ok()) status = all.AddPiece(pool, layout, some);
  });
  if (!status.ok()) return status;
  return all;
}

absl::Status Tiles::AddPiece(pool::Pool& pool, const kernels::TileLayout& layout,
                             std::size_t tiles) {
  absl::StatusOr<pool::Block> piece =
      pool.Allocate(tiles * layout.summary_bytes, pool::Fit::kExact, pool::MemoryTag::kTiles);
  if (!piece.ok()) return piece.status();
  for (std::size_t i = 0; i < tiles; ++i) {
    const std::uint64_t at = i * layout.summary_bytes;
    summaries_.push_back({piece->offset() + at, piece->data() + at});
  }
  pool_bytes_ += piece->bytes();
  pieces_.push_back(*std::move(piece));
  return absl::OkStatus();
}

std::uint64_t Tiles::PoolBytes(const kernels::TileShape& shape, std::size_t count) {
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  std::uint64_t bytes = count * pool::Slabs::RoundUp(layout.bytes, pool::Fit::kExact);
  if (layout.summary_bytes == 0) return bytes;
  ForEachPiece(layout, count, [&](std::size_t tiles) {
    bytes += pool::Slabs::RoundUp(tiles * layout.summary_bytes, pool::Fit::kExact);
  });
  return bytes;
}

std::vector<device::TilePlace> Tiles::places() const {
  std::vector<device::TilePlace> places;
  places.reserve(size());
  for (std::size_t i = 0; i < size(); ++i) places.push_back(place(i));
  return places;
}

void Tiles::Append(Tiles more) {
  std::move(more.tiles_.begin(), more.tiles_.end(), std::back_inserter(tiles_));
  std::move(more.pieces_.begin(), more.pieces_.end(), std::back_inserter(pieces_));
  summaries_.insert(summaries_.end(), more.summaries_.begin(), more.summaries_.end());
  pool_bytes_ += more.pool_bytes_;
}

}  // namespace tessera::cache
