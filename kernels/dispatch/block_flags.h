// Taken-block flags, one byte of 0 or 1 per block, processed eight at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// Blocks per word of flags. Tiles have 2, 4 or 8 blocks, so a word covers whole tiles.
inline constexpr std::uint32_t kFlagBlocks = 8;
static_assert(kFlagBlocks % kMaxTileBlocks == 0);

// Loads up to kFlagBlocks flags, the first in the lowest byte; `left` flags remain in the array.
inline std::uint64_t LoadFlags(const std::uint8_t* taken, std::uint32_t left) {
  std::uint64_t flags = 0;
  if (left >= kFlagBlocks) {
    std::memcpy(&flags, taken, sizeof(flags));
  } else {
    std::memcpy(&flags, taken, left);
  }
  return flags;
}

inline std::uint32_t SumFlags(std::uint64_t flags) {
  return static_cast<std::uint32_t>(flags * 0x0101010101010101u >> 56);
}

// A word with the flag of every block that begins a tile of `blocks_of_tile` blocks.
constexpr std::uint64_t TileStarts(std::uint32_t blocks_of_tile) {
  std::uint64_t starts = 0;
  for (std::uint32_t b = 0; b < kFlagBlocks; b += blocks_of_tile)
    starts |= std::uint64_t{1} << 8 * b;
  return starts;
}

}  // namespace tessera::kernels
