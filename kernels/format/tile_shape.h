// What a tile holds, and where: the byte layout of every tile format. README.md draws it.
//
// A tile is a sequence of arrays over its 32 rows, in this order, each beginning where the one
// before ends:
//
//   dense    K data | V data | weights | positions
//   packed   K bits | K scales | K data | V bits | V scales | V data | weights | positions
//
// The summaries of its blocks stand elsewhere, those of neighbours side by side, since a selection
// reads all of them and few of the rows:
//
//   dense    block data
//   packed   block bits | block scales | block data
//
// Scales exist for int8 and fp8 only; bits where the rows of that side drop channels; summaries,
// weights and positions where the shape has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels {

// Of the byte layouts below and of the meaning of every bit in them. Golden files hold each
// version.
inline constexpr std::uint32_t kTileFormatVersion = 3;

// What a block of entries is judged by when attention reads a selection. The numbers are part of
// the mapped protocol: never reuse one.
enum class Summary : std::uint8_t {
  kNone = 0,
  kMean = 1,    // the mean key, in the row form of the tile's keys
  kMinMax = 2,  // per channel the least and the greatest key, as [min of all channels | max of all]
};

inline constexpr std::uint32_t kMinBlock = 4;
// Of the first byte of a tile's summaries.
inline constexpr std::uint32_t kSummaryAlignment = 4;
inline constexpr std::uint32_t kMaxTileBlocks = kTileEntries / kMinBlock;

constexpr bool IsSummary(std::uint8_t value) { return value <= 2; }
constexpr bool IsBlock(std::uint32_t block) { return block == 4 || block == 8 || block == 16; }
constexpr bool IsGroup(std::uint32_t group) { return group == 1 || group == 2 || group == 4; }

constexpr bool IsPacked(TileFormat format) { return format >= TileFormat::kPackedBf16; }
constexpr TileFormat PackedFormat(ValueType type) {
  return static_cast<TileFormat>(static_cast<std::uint8_t>(type) + 3);
}
// Only of packed formats.
constexpr ValueType ValuesOf(TileFormat format) {
  return static_cast<ValueType>(static_cast<std::uint8_t>(format) - 3);
}
// Only of dense formats.
constexpr ElementType ElementsOf(TileFormat format) { return static_cast<ElementType>(format); }

// What of a rotated row is stored: some of its channels, or all, and then no bitmap says which.
struct RowShape {
  std::uint16_t channels = 128;  // of the row: head_dim, or truncated
  std::uint16_t kept = 128;      // values stored of them, a multiple of `group`

  constexpr bool has_bitmap() const { return kept != channels; }
  bool operator==(const RowShape&) const = default;
};

struct TileShape {
  TileFormat format = TileFormat::kDenseBf16;
  std::uint16_t head_dim = 128;
  // The fields up to `group` say something of packed rows; in dense shapes they are as here.
  RowShape key;  // of mean keys, too
  RowShape value;
  std::uint8_t group = 1;  // adjacent channels kept or dropped together
  Summary summary = Summary::kNone;
  std::uint8_t block = 0;  // entries per block; 0 without summaries
  bool weights = false;    // fp32 s per entry: how many tokens it stands for
  bool positions = false;  // u32 per entry, counted from the segment's first position

  constexpr bool packed() const { return IsPacked(format); }
  // Blocks of a full tile.
  constexpr std::uint32_t blocks() const { return block == 0 ? 0 : kTileEntries / block; }
  bool operator==(const TileShape&) const = default;
};

constexpr TileShape DenseShape(std::uint32_t head_dim, ElementType type) {
  const auto dim = static_cast<std::uint16_t>(head_dim);
  return {.format = DenseFormat(type), .head_dim = dim, .key = {dim, dim}, .value = {dim, dim}};
}

// Null where a kernel may follow tiles of this shape; else what is wrong with it. For shapes that
// come from mapped memory or a request.
constexpr const char* WhyNotServed(const TileShape& shape) {
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
  return nullptr;
}

// Rotated elements of this magnitude or more, as bits, are refused by `encode`. Of dense rows: what
// is not finite.
constexpr std::uint32_t UnstorableBits(const TileShape& shape) {
  return shape.packed() ? UnstorableBits(ValuesOf(shape.format)) : 0x7f800000u;
}

// The element type of min/max rows: that of dense rows; beside packed ones bf16, rounded outward.
constexpr ElementType MinMaxType(const TileShape& shape) {
  return shape.packed() ? ElementType::kBf16 : ElementsOf(shape.format);
}

// The bytes of one row of each of its arrays; 0 where the shape lacks the array.
struct RowBytes {
  std::uint32_t bits;   // a bitmap: one bit per group, bit i in byte i / 8, at i % 8
  std::uint32_t scale;  // 0 or 2
  std::uint32_t data;   // the stored values
};

// Byte offsets, and the bytes of one row of each array. An array that the shape lacks has 0 bytes
// per row. Data only, so that files compiled with ISA flags may hold it.
struct TileLayout {
  // From the tile's first byte.
  std::uint32_t key_bits;
  std::uint32_t key_scales;
  std::uint32_t key_data;
  std::uint32_t value_bits;
  std::uint32_t value_scales;
  std::uint32_t value_data;
  std::uint32_t weights;    // 4-byte aligned
  std::uint32_t positions;  // likewise
  std::uint32_t bytes;      // of the tile
  // From the first byte of its summaries.
  std::uint32_t block_bits;
  std::uint32_t block_scales;
  std::uint32_t block_data;
  std::uint32_t summary_bytes;  // a multiple of kSummaryAlignment; 0: the shape has none

  RowBytes key_row;
  RowBytes value_row;
  RowBytes block_row;
};

// Of K or V rows.
constexpr RowBytes RowBytesOf(const TileShape& shape, const RowShape& row) {
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

// Of a tile and its summaries.
constexpr std::uint64_t WholeBytes(const TileLayout& layout) {
  return std::uint64_t{layout.bytes} + layout.summary_bytes;
}
// Where they stand for whoever keeps both in one place: right behind the tile.
constexpr const std::byte* SummariesBehind(const std::byte* tile, const TileLayout& layout) {
  return tile + layout.bytes;
}
constexpr std::byte* SummariesBehind(std::byte* tile, const TileLayout& layout) {
  return tile + layout.bytes;
}

// What attention computes with: the channels of the wider side in whole vectors, the rest zero. The
// rows of rotated queries and of partial outputs have this many elements.
inline constexpr std::uint32_t kChannelPadding = 32;
constexpr std::uint32_t PaddedChannels(const TileShape& shape) {
  const std::uint32_t widest =
      shape.key.channels > shape.value.channels ? shape.key.channels : shape.value.channels;
  return (widest + kChannelPadding - 1) / kChannelPadding * kChannelPadding;
}

// The matrix of a rotation: [channels][head_dim], in whole units of 64 bytes, so that what stands
// behind it is aligned.
constexpr std::uint64_t RotationBytes(const TileShape& shape, const RowShape& row,
                                      ElementType type) {
  return (std::uint64_t{row.channels} * shape.head_dim * ElementBytes(type) + 63) / 64 * 64;
}

// Of R_k and R_v, where there are both.
constexpr std::uint64_t RotationBytes(const TileShape& shape, ElementType type) {
  return RotationBytes(shape, shape.key, type) + RotationBytes(shape, shape.value, type);
}

namespace internal {
constexpr TileShape Example(TileFormat format, RowShape key, RowShape value, std::uint8_t group) {
  return {.format = format, .key = key, .value = value, .group = group};
}
constexpr TileShape Quarter(TileFormat format, std::uint8_t group) {
  return Example(format, {128, 32}, {128, 32}, group);
}
}  // namespace internal
// A quarter of 128 channels: 160, 144 and 136 bytes for K and V of an entry in bf16; 100 in int8.
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 1)).bytes == 32 * 160);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 2)).bytes == 32 * 144);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedBf16, 4)).bytes == 32 * 136);
static_assert(LayoutOf(internal::Quarter(TileFormat::kPackedInt8, 1)).bytes == 32 * 100);
// 77 channels of every key, all of every value: no bitmaps.
static_assert(LayoutOf(internal::Example(TileFormat::kPackedBf16, {77, 77}, {128, 128}, 1)).bytes ==
              32 * 410);
static_assert(LayoutOf(DenseShape(128, ElementType::kBf16)).value_data ==
              DenseTile{128, ElementType::kBf16}.value_offset(0));

}  // namespace tessera::kernels
