#include "daemon/cache/segment.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"

namespace tessera::cache {

namespace {
constexpr std::size_t kFirstTableTiles = 8;
}

std::uint64_t Segment::TableBytes(std::size_t tiles) {
  // Doubling keeps the copies of a growing segment linear.
  return std::bit_ceil(std::max(tiles, kFirstTableTiles)) * sizeof(std::uint64_t);
}

pool::Block Segment::AddTiles(std::vector<pool::Block> tiles, pool::Block larger_table) {
  pool::Block old;
  if (larger_table.valid()) {
    if (table_.valid()) {
      std::memcpy(larger_table.data(), table_.data(), tiles_.size() * sizeof(std::uint64_t));
    }
    old = std::exchange(table_, std::move(larger_table));
  }
  TESSERA_CHECK(TableHolds(tiles_.size() + tiles.size()), "the table has room for the tiles");
  std::byte* table = table_.data();
  for (pool::Block& tile : tiles) {
    const std::uint64_t offset = tile.offset();
    std::memcpy(table + tiles_.size() * sizeof offset, &offset, sizeof offset);
    tiles_.push_back(std::move(tile));
  }
  return old;
}

}  // namespace tessera::cache
