// The byte layout of a dense tile: 32 consecutive entries, all K rows first, then all V rows.
//
//   offset 0                       K row 0, K row 1, ... K row 31
//   offset 32 * row_bytes          V row 0, V row 1, ... V row 31
//
// A row is head_dim elements, channel 0 first, without padding. Tail rings consist of the same
// tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/element.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kTileEntries = 32;

// The meaning of a tile's bytes. The numbers are part of the mapped protocol: never reuse one.
enum class TileFormat : std::uint8_t {
  kDenseBf16 = 1,
  kDenseFp16 = 2,
  kDenseFp32 = 3,
  kPackedBf16 = 4,
  kPackedFp16 = 5,
  kPackedInt8 = 6,
  kPackedFp8 = 7,
  kPlanes = 8,  // see planes.h
};

constexpr TileFormat DenseFormat(ElementType type) { return static_cast<TileFormat>(type); }

constexpr bool IsTileFormat(std::uint8_t value) { return value >= 1 && value <= 8; }

inline constexpr std::uint32_t kHeadDims[] = {64, 128, 256};

constexpr bool IsHeadDim(std::uint32_t head_dim) {
  for (std::uint32_t served : kHeadDims) {
    if (served == head_dim) return true;
  }
  return false;
}

struct DenseTile {
  std::uint32_t head_dim;
  ElementType type;

  constexpr std::size_t row_bytes() const { return head_dim * ElementBytes(type); }
  constexpr std::size_t key_offset(std::uint32_t row) const { return row * row_bytes(); }
  constexpr std::size_t value_offset(std::uint32_t row) const {
    return (kTileEntries + row) * row_bytes();
  }
  constexpr std::size_t bytes() const { return 2 * kTileEntries * row_bytes(); }
};

static_assert(DenseTile{128, ElementType::kBf16}.bytes() == 16384);
static_assert(DenseTile{64, ElementType::kFp32}.value_offset(1) == 33 * 256);

}  // namespace tessera::kernels
