// Golden tiles: inputs, the bytes that the reference makes of them, and what those bytes decode to.
// Written once per kTileFormatVersion and never again.
//
// A file, little-endian, without padding:
//
//   8   "TESSTILE"
//   4   u32 tile format version
//   4   u8 format, group, summary, block
//   10  u16 head_dim, channels and kept of K, channels and kept of V
//   4   u8 has weights, has positions, element type of the input, 0
//   4   u32 rows
//       input keys, then values     [rows][head_dim] of the element type
//       weights                     f32 [rows], if the shape has them
//       positions                   u32 [rows], likewise
//       the tile, then its summaries
//       decoded keys, then values   f32 [rows][channels of the side]
//
// Keys and values are not rotated. Where the shape cuts channels of a side its rotation is the
// identity's first rows, as a matrix of bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

struct GoldenTile {
  TileShape shape;
  ElementType type = ElementType::kBf16;
  std::uint32_t rows = 0;
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  std::vector<float> weights;
  std::vector<std::uint32_t> positions;
  std::vector<std::byte> tile;
  std::vector<float> decoded_keys;
  std::vector<float> decoded_values;

  bool operator==(const GoldenTile&) const = default;
};

struct NamedGoldenTile {
  std::string name;  // file name without ".bin"
  GoldenTile golden;
};

// The tiles of kTileFormatVersion, from fixed inputs.
std::vector<NamedGoldenTile> MakeGoldenTiles();

// Encodes the input with an implementation. Returns false if it refuses.
bool EncodeGolden(const Operations& operations, GoldenTile& golden);
void DecodeGolden(const Operations& operations, GoldenTile& golden);

std::vector<std::byte> SerialiseGolden(const GoldenTile& golden);
// Returns nullopt if the bytes are not a golden tile of kTileFormatVersion.
std::optional<GoldenTile> ParseGolden(const std::vector<std::byte>& bytes);
std::optional<GoldenTile> ReadGolden(const std::filesystem::path& file);

// Writes all tiles into a new folder. Returns an error text, empty on success. Refuses an existing
// folder, because the meaning of a version never changes.
std::string WriteGoldenTiles(const std::filesystem::path& folder);

}  // namespace tessera::kernels
