// Addresses the rows of a lane's tail ring, and writes them.
//
// A ring consists of `tiles` dense tiles. Token t is in tile (t / 32) % tiles, row t % 32. The
// rings of a sequence's lanes follow each other in lane order: see lane_layout.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/dense_tile.h"

namespace tessera::shm {

struct TailRing {
  std::byte* base = nullptr;
  std::uint32_t tiles = 0;
  kernels::DenseTile tile;

  std::uint64_t capacity() const { return std::uint64_t{tiles} * kernels::kTileEntries; }
  std::size_t bytes() const { return tiles * tile.bytes(); }

  std::byte* TileOf(std::uint64_t token) const {
    return base + (token / kernels::kTileEntries) % tiles * tile.bytes();
  }
  std::byte* Key(std::uint64_t token) const {
    return TileOf(token) + tile.key_offset(token % kernels::kTileEntries);
  }
  std::byte* Value(std::uint64_t token) const {
    return TileOf(token) + tile.value_offset(token % kernels::kTileEntries);
  }
};

// Writes the key and value row of a token.
inline void StoreRow(const TailRing& ring, std::uint64_t token, const void* key,
                     const void* value) {
  std::memcpy(ring.Key(token), key, ring.tile.row_bytes());
  std::memcpy(ring.Value(token), value, ring.tile.row_bytes());
}

}  // namespace tessera::shm
