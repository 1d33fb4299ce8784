#include "daemon/cache/tiles.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::cache {

namespace {

// Long enough to be read as a stream (whole pieces of one shape mostly follow one another), short
// enough that the sizes of last ones are few: each size has a slab of its own.
constexpr std::uint64_t kPieceBytes = 16 * 1024;

// Of as many tiles as a piece has summaries of.
std::size_t TilesPerPiece(const kernels::TileLayout& layout) {
  return std::max<std::uint64_t>(1, kPieceBytes / layout.summary_bytes);
}

// Whole pieces have one size a shape. The last of an allocation has any, and objects of one size
// share a slab.
pool::Fit FitOf(const kernels::TileLayout& layout, std::size_t tiles) {
  return tiles == TilesPerPiece(layout) ? pool::Fit::kExact : pool::Fit::kRounded;
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
  while (all.summaries_.size() < count) {
    const std::size_t some = std::min(count - all.summaries_.size(), TilesPerPiece(layout));
    absl::StatusOr<pool::Block> piece =
        pool.Allocate(some * layout.summary_bytes, FitOf(layout, some), pool::MemoryTag::kTiles);
    if (!piece.ok()) return piece.status();
    for (std::size_t i = 0; i < some; ++i) {
      const std::uint64_t at = i * layout.summary_bytes;
      all.summaries_.push_back({piece->offset() + at, piece->data() + at});
    }
    all.pool_bytes_ += piece->bytes();
    all.pieces_.push_back(*std::move(piece));
  }
  return all;
}

std::uint64_t Tiles::PoolBytes(const kernels::TileShape& shape, std::size_t count) {
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  std::uint64_t bytes = count * pool::Slabs::RoundUp(layout.bytes, pool::Fit::kExact);
  if (layout.summary_bytes == 0 || count == 0) return bytes;
  const std::size_t per_piece = TilesPerPiece(layout);
  const auto piece = [&](std::size_t tiles) {
    return pool::Slabs::RoundUp(tiles * layout.summary_bytes, FitOf(layout, tiles));
  };
  bytes += count / per_piece * piece(per_piece);
  if (count % per_piece != 0) bytes += piece(count % per_piece);
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
