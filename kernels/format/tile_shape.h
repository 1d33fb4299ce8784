// The shape of a tile, and the byte layout of every tile format. README.md has a worked example.
//
// A tile is a sequence of arrays over its 32 rows, back to back in this order:
//
//   dense    K data | V data | weights | positions
//   packed   K bits | K scales | K data | V bits | V scales | V data | weights | positions
//   planes   8 quads (planes.h) | weights | positions
//
// The summaries of a tile's blocks are stored outside the tile, next to those of neighbouring
// tiles, because selection reads all summaries but few rows:
//
//   dense    block data
//   packed   block bits | block scales | block data
//   signs    sign bits | norms (planes.h), beside tiles of any format
//
// Scales exist for int8 and fp8 only, bits only if rows of that side drop channels, and summaries,
// weights and positions only if the shape has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/planes.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels {

// Version of the byte layouts below, including the meaning of every bit. Each version has golden
// files.
inline constexpr std::uint32_t kTileFormatVersion = 3;

// How a block of entries is summarized for selection. The numbers are part of the mapped protocol:
// never reuse one.
enum class Summary : std::uint8_t {
  kNone = 0,
  kMean = 1,    // the mean key, encoded like the tile's keys
  kMinMax = 2,  // per channel the least and greatest key: [all minima | all maxima]
  kSigns = 3,   // per key the signs of half of its rotated channels, and a norm; block is a quad
};

inline constexpr std::uint32_t kMinBlock = 4;
// Alignment of a tile's summaries in bytes.
inline constexpr std::uint32_t kSummaryAlignment = 4;
inline constexpr std::uint32_t kMaxTileBlocks = kTileEntries / kMinBlock;

constexpr bool IsSummary(std::uint8_t value) { return value <= 3; }
constexpr bool IsBlock(std::uint32_t block) { return block == 4 || block == 8 || block == 16; }
constexpr bool IsGroup(std::uint32_t group) { return group == 1 || group == 2 || group == 4; }

// Rows are stored in a rotated space: packed or in planes.
constexpr bool IsPacked(TileFormat format) { return format >= TileFormat::kPackedBf16; }
constexpr TileFormat PackedFormat(ValueType type) {
  return static_cast<TileFormat>(static_cast<std::uint8_t>(type) + 3);
}
// Packed formats except planes.
constexpr ValueType ValuesOf(TileFormat format) {
  return static_cast<ValueType>(static_cast<std::uint8_t>(format) - 3);
}
// Dense formats only.
constexpr ElementType ElementsOf(TileFormat format) { return static_cast<ElementType>(format); }

// The stored channels of a rotated row. If all channels are kept there is no bitmap.
struct RowShape {
  std::uint16_t channels = 128;  // channels of the row: head_dim, or fewer if truncated
  std::uint16_t kept = 128;      // stored values, a multiple of `group`

  constexpr bool has_bitmap() const { return kept != channels; }
  bool operator==(const RowShape&) const = default;
};

struct TileShape {
  TileFormat format = TileFormat::kDenseBf16;
  std::uint16_t head_dim = 128;
  // `key`, `value` and `group` describe packed rows; dense and planes shapes keep every channel.
  RowShape key;  // also of mean keys
  RowShape value;
  std::uint8_t group = 1;  // adjacent channels kept or dropped together
  Summary summary = Summary::kNone;
  std::uint8_t block = 0;  // entries per block; 0 without summaries
  bool weights = false;    // fp32 per entry: the number of tokens it stands for
  bool positions = false;  // u32 per entry, relative to the segment's first position
  // kPlanes only.
  PlaneWidths key_planes;
  PlaneWidths value_planes;

  constexpr bool packed() const { return IsPacked(format); }
  constexpr bool planes() const { return format == TileFormat::kPlanes; }
  // Blocks of a full tile.
  constexpr std::uint32_t blocks() const { return block == 0 ? 0 : kTileEntries / block; }
  bool operator==(const TileShape&) const = default;
};

constexpr TileShape DenseShape(std::uint32_t head_dim, ElementType type) {
  const auto dim = static_cast<std::uint16_t>(head_dim);
  return {.format = DenseFormat(type), .head_dim = dim, .key = {dim, dim}, .value = {dim, dim}};
}

constexpr TileShape PlanesShape(std::uint32_t head_dim, PlaneWidths key, PlaneWidths value) {
  const auto dim = static_cast<std::uint16_t>(head_dim);
  return {.format = TileFormat::kPlanes,
          .head_dim = dim,
          .key = {dim, dim},
          .value = {dim, dim},
          .key_planes = key,
          .value_planes = value};
}

// The shape with an index of signs.
constexpr TileShape WithSigns(TileShape shape) {
  shape.summary = Summary::kSigns;
  shape.block = kQuadRows;
  return shape;
}

namespace internal {
constexpr const char* UnsupportedPlanesReason(const TileShape& shape) {
  if (!shape.planes()) {
    return shape.key_planes.planes() + shape.value_planes.planes() == 0
               ? nullptr
               : "only the planes format has planes";
  }
  if (const char* reason = UnsupportedReason(shape.key_planes)) return reason;
  if (const char* reason = UnsupportedReason(shape.value_planes)) return reason;
  if (shape.group != 1) return "planes have groups of one channel";
  const RowShape sides[] = {shape.key, shape.value};
  for (const RowShape& row : sides) {
    if (row.channels != shape.head_dim || row.kept != shape.head_dim) {
      return "planes keep every channel";
    }
  }
  if (shape.summary != Summary::kNone && shape.summary != Summary::kSigns) {
    return "planes have no block summaries other than signs";
  }
  return nullptr;
}

constexpr const char* UnsupportedSignsReason(const TileShape& shape) {
  if (shape.summary != Summary::kSigns) return nullptr;
  if (shape.block != kQuadRows) return "a block of the sign index is not four entries";
  if (shape.packed() && !shape.planes()) return "packed tiles have no sign index";
  if (shape.planes() && shape.key_planes.planes() != 2) return "signs need keys of two planes";
  return nullptr;
}
}  // namespace internal

// Null if kernels support tiles of this shape, otherwise the reason. Checks shapes that come from
// mapped memory or a request.
constexpr const char* UnsupportedReason(const TileShape& shape) {
  if (!IsTileFormat(static_cast<std::uint8_t>(shape.format))) return "unknown tile format";
  if (!IsHeadDim(shape.head_dim)) return "head_dim is not 64, 128 or 256";
  if (!IsGroup(shape.group)) return "group is not 1, 2 or 4";
  const RowShape sides[] = {shape.key, shape.value};
  for (const RowShape& row : sides) {
    if (row.channels == 0 || row.channels > shape.head_dim) return "channels is not in 1..head_dim";
    if (row.channels % shape.group != 0) return "channels is not a multiple of group";
    if (row.kept == 0 || row.kept > row.channels) return "kept is not in 1..channels";
    if (row.kept % shape.group != 0) return "kept is not a multiple of group";
    if (!shape.packed() && row.kept != shape.head_dim) return "a dense row keeps every channel";
  }
  if (!IsSummary(static_cast<std::uint8_t>(shape.summary))) return "unknown block summary";
  if ((shape.summary == Summary::kNone) != (shape.block == 0)) {
    return "block size without summary, or summary without block size";
  }
  if (shape.block != 0 && !IsBlock(shape.block)) return "block is not 4, 8 or 16";
  if (const char* reason = internal::UnsupportedPlanesReason(shape)) return reason;
  return internal::UnsupportedSignsReason(shape);
}

// `encode` rejects rotated elements whose magnitude, as bits, is at least this. For dense rows only
// values that are not finite are rejected.
constexpr std::uint32_t UnstorableBits(const TileShape& shape) {
  return shape.packed() && !shape.planes() ? UnstorableBits(ValuesOf(shape.format)) : 0x7f800000u;
}

// The element type of min/max summaries: that of dense rows, or bf16 rounded outward for packed
// rows.
constexpr ElementType MinMaxType(const TileShape& shape) {
  return shape.packed() ? ElementType::kBf16 : ElementsOf(shape.format);
}

// Bytes per row of each array of one side; 0 if the shape lacks the array.
struct RowBytes {
  std::uint32_t bits;   // bitmap: one bit per group, group i is bit i % 8 of byte i / 8
  std::uint32_t scale;  // 0 or 2
  std::uint32_t data;   // the stored values
};

// Byte offsets of the arrays, and their bytes per row (0 for an array that the shape lacks). Data
// only, so that files compiled with ISA flags may include it.
struct TileLayout {
  // Relative to the tile's first byte.
  std::uint32_t key_bits;
  std::uint32_t key_scales;
  std::uint32_t key_data;
  std::uint32_t value_bits;
  std::uint32_t value_scales;
  std::uint32_t value_data;
  std::uint32_t weights;    // 4-byte aligned
  std::uint32_t positions;  // likewise
  std::uint32_t bytes;      // size of the tile
  // Relative to the first byte of the tile's summaries.
  std::uint32_t block_bits;
  std::uint32_t block_scales;
  std::uint32_t block_data;
  std::uint32_t summary_bytes;  // a multiple of kSummaryAlignment; 0 without summaries

  RowBytes key_row;
  RowBytes value_row;
  RowBytes block_row;

  QuadLayout quad;  // planes only; `quad.bytes` is 0 in other formats
};

// For K or V rows.
constexpr RowBytes RowBytesOf(const TileShape& shape, const RowShape& row) {
  if (shape.planes()) return {};  // rows are interleaved
  if (!shape.packed()) {
    return {.bits = 0,
            .scale = 0,
            .data = static_cast<std::uint32_t>(shape.head_dim *
                                               ElementBytes(ElementsOf(shape.format)))};
  }
  const ValueType type = ValuesOf(shape.format);
  const std::uint32_t groups = row.channels / shape.group;
  return {.bits = row.has_bitmap() ? (groups + 7) / 8 : 0,
          .scale = static_cast<std::uint32_t>(ScaleBytes(type)),
          .data = static_cast<std::uint32_t>(row.kept * ValueBytes(type))};
}

constexpr RowBytes BlockRowBytesOf(const TileShape& shape) {
  switch (shape.summary) {
    case Summary::kNone:
      break;
    case Summary::kMean:
      return RowBytesOf(shape, shape.key);
    case Summary::kSigns:
      return {.bits = kQuadRows * SignBytes(shape.head_dim), .scale = 0, .data = kQuadRows};
    case Summary::kMinMax:
      return {.bits = 0,
              .scale = 0,
              .data = static_cast<std::uint32_t>(2 * shape.key.channels *
                                                 ElementBytes(MinMaxType(shape)))};
  }
  return {};
}

constexpr TileLayout LayoutOf(const TileShape& shape) {
  TileLayout layout = {};
  layout.key_row = RowBytesOf(shape, shape.key);
  layout.value_row = RowBytesOf(shape, shape.value);
  layout.block_row = BlockRowBytesOf(shape);
  std::uint32_t at = 0;
  const auto place = [&at](std::uint32_t rows, std::uint32_t row_bytes) {
    const std::uint32_t begin = at;
    at += rows * row_bytes;
    return begin;
  };
  layout.key_bits = place(kTileEntries, layout.key_row.bits);
  layout.key_scales = place(kTileEntries, layout.key_row.scale);
  layout.key_data = place(kTileEntries, layout.key_row.data);
  layout.value_bits = place(kTileEntries, layout.value_row.bits);
  layout.value_scales = place(kTileEntries, layout.value_row.scale);
  layout.value_data = place(kTileEntries, layout.value_row.data);
  if (shape.planes()) {
    layout.quad = QuadLayoutOf(shape.head_dim, shape.key_planes, shape.value_planes);
    place(kTileQuads, layout.quad.bytes);
  }
  layout.weights = place(shape.weights ? kTileEntries : 0, sizeof(float));
  layout.positions = place(shape.positions ? kTileEntries : 0, sizeof(std::uint32_t));
  layout.bytes = at;
  at = 0;
  layout.block_bits = place(shape.blocks(), layout.block_row.bits);
  layout.block_scales = place(shape.blocks(), layout.block_row.scale);
  layout.block_data = place(shape.blocks(), layout.block_row.data);
  layout.summary_bytes = (at + kSummaryAlignment - 1) / kSummaryAlignment * kSummaryAlignment;
  return layout;
}

// A tile plus its summaries.
constexpr std::uint64_t TileAndSummaryBytes(const TileLayout& layout) {
  return std::uint64_t{layout.bytes} + layout.summary_bytes;
}
// The address of the summaries if they are stored directly after their tile.
constexpr const std::byte* SummariesAfter(const std::byte* tile, const TileLayout& layout) {
  return tile + layout.bytes;
}
constexpr std::byte* SummariesAfter(std::byte* tile, const TileLayout& layout) {
  return tile + layout.bytes;
}

// The row length of rotated queries and partial outputs: the channels of the wider side,
// zero-padded to whole vectors.
inline constexpr std::uint32_t kChannelPadding = 32;
constexpr std::uint32_t PaddedChannels(const TileShape& shape) {
  const std::uint32_t widest =
      shape.key.channels > shape.value.channels ? shape.key.channels : shape.value.channels;
  return (widest + kChannelPadding - 1) / kChannelPadding * kChannelPadding;
}

// The size of a rotation matrix, [channels][head_dim], rounded up to 64 bytes to keep what follows
// it aligned.
constexpr std::uint64_t RotationBytes(const TileShape& shape, const RowShape& row,
                                      ElementType type) {
  return (std::uint64_t{row.channels} * shape.head_dim * ElementBytes(type) + 63) / 64 * 64;
}

// The total for R_k and R_v.
constexpr std::uint64_t RotationBytes(const TileShape& shape, ElementType type) {
  return RotationBytes(shape, shape.key, type) + RotationBytes(shape, shape.value, type);
}

// A book as it is stored, the rotations and means of planes: R_k, R_v, mu_k, mu_v, all bf16.
struct BookLayout {
  std::uint64_t key_rotation;
  std::uint64_t value_rotation;
  std::uint64_t key_mean;
  std::uint64_t value_mean;
  std::uint64_t bytes;
};
constexpr BookLayout BookLayoutOf(std::uint32_t head_dim) {
  const std::uint64_t row = std::uint64_t{head_dim} * ElementBytes(ElementType::kBf16);
  const std::uint64_t matrix = row * head_dim;
  return {.key_rotation = 0,
          .value_rotation = matrix,
          .key_mean = 2 * matrix,
          .value_mean = 2 * matrix + row,
          .bytes = 2 * matrix + 2 * row};
}

namespace internal {
constexpr TileShape Example(TileFormat format, RowShape key, RowShape value, std::uint8_t group) {
  return {.format = format, .key = key, .value = value, .group = group};
}
constexpr TileShape Quarter(TileFormat format, std::uint8_t group) {
  return Example(format, {128, 32}, {128, 32}, group);
}
}  // namespace internal
// A quarter of 128 channels: K and V of an entry take 160, 144 and 136 bytes in bf16, 100 in int8.
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 1)).bytes == 32 * 160);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 2)).bytes == 32 * 144);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 4)).bytes == 32 * 136);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedInt8, 1)).bytes == 32 * 100);
// 77 channels of every key, all channels of every value: no bitmaps.
static_assert(LayoutOf(internal::Example(TileFormat::kPackedBf16, {77, 77}, {128, 128}, 1)).bytes ==
              32 * 410);
// 152 bytes per token, 9 more with signs.
static_assert(LayoutOf(PlanesShape(128, {6, 4}, {4})).bytes == 32 * 152);
static_assert(LayoutOf(WithSigns(PlanesShape(128, {6, 4}, {4}))).summary_bytes == 32 * 9);
static_assert(LayoutOf(DenseShape(128, ElementType::kBf16)).value_data ==
              DenseTile{128, ElementType::kBf16}.value_offset(0));

}  // namespace tessera::kernels
