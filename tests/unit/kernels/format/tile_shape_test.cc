#include "kernels/format/tile_shape.h"

#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

RowShape RandomRow(TestRandom& random, const TileShape& shape) {
  const auto groups = random.Between(1, shape.head_dim / shape.group);
  const auto kept = random.OneIn(3) ? groups : random.Between(1, groups);
  return {.channels = static_cast<std::uint16_t>(groups * shape.group),
          .kept = static_cast<std::uint16_t>(kept * shape.group)};
}

TileShape RandomServedShape(TestRandom& random) {
  TileShape shape;
  shape.format = static_cast<TileFormat>(random.Between(1, 7));
  shape.head_dim = static_cast<std::uint16_t>(random.Pick(kHeadDims));
  shape.key = shape.value = {shape.head_dim, shape.head_dim};
  if (shape.packed()) {
    shape.group = static_cast<std::uint8_t>(1u << random.Below(3));
    shape.key = RandomRow(random, shape);
    shape.value = random.OneIn(2) ? shape.key : RandomRow(random, shape);
  }
  shape.summary = static_cast<Summary>(random.Below(3));
  if (shape.summary != Summary::kNone) {
    shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
  }
  shape.weights = random.OneIn(2);
  shape.positions = random.OneIn(2);
  return shape;
}

// The size of a row of keys or values, as specified by the format.
std::uint32_t BytesOf(const TileShape& shape, const RowShape& row) {
  switch (shape.format) {
    case TileFormat::kDenseBf16:
    case TileFormat::kDenseFp16:
      return 2u * shape.head_dim;
    case TileFormat::kDenseFp32:
      return 4u * shape.head_dim;
    default:
      break;
  }
  const auto bits = row.kept == row.channels
                        ? 0u
                        : static_cast<std::uint32_t>(std::ceil(row.channels / shape.group / 8.0));
  const bool scaled = shape.format >= TileFormat::kPackedInt8;
  return bits + (scaled ? 2 + row.kept : 2u * row.kept);
}

std::uint32_t BlockBytes(const TileShape& shape) {
  if (shape.summary == Summary::kNone) return 0;
  if (shape.summary == Summary::kMean) return BytesOf(shape, shape.key);
  return 2 * shape.key.channels * (shape.format == TileFormat::kDenseFp32 ? 4 : 2);
}

TEST(TileLayout, IsTheSumOfItsArrays) {
  TestRandom random;
  for (int i = 0; i < 20000; ++i) {
    const TileShape shape = RandomServedShape(random);
    ASSERT_EQ(UnsupportedReason(shape), nullptr);
    const TileLayout layout = LayoutOf(shape);
    const std::uint32_t blocks = shape.block == 0 ? 0 : 32 / shape.block;
    ASSERT_EQ(shape.blocks(), blocks);
    ASSERT_LE(blocks, kMaxTileBlocks);
    const std::uint32_t key = BytesOf(shape, shape.key);
    const std::uint32_t value = BytesOf(shape, shape.value);
    ASSERT_EQ(layout.key_row.bits + layout.key_row.scale + layout.key_row.data, key);
    ASSERT_EQ(layout.value_row.bits + layout.value_row.scale + layout.value_row.data, value);
    ASSERT_EQ(layout.block_row.bits + layout.block_row.scale + layout.block_row.data,
              BlockBytes(shape));
    std::uint32_t bytes = 32 * (key + value);
    ASSERT_EQ(layout.weights, bytes);
    if (shape.weights) bytes += 128;
    ASSERT_EQ(layout.positions, bytes);
    if (shape.positions) bytes += 128;
    ASSERT_EQ(layout.bytes, bytes);
    ASSERT_EQ(layout.weights % 4, 0u);
    ASSERT_EQ(layout.block_data + blocks * layout.block_row.data, blocks * BlockBytes(shape));
    ASSERT_EQ(layout.summary_bytes, (blocks * BlockBytes(shape) + 3) / 4 * 4);
    ASSERT_EQ(TileAndSummaryBytes(layout), std::uint64_t{layout.bytes} + layout.summary_bytes);
  }
}

// Each array begins where the previous one ends.
TEST(TileLayout, ArraysFollowEachOther) {
  TestRandom random;
  for (int i = 0; i < 20000; ++i) {
    const TileShape shape = RandomServedShape(random);
    const TileLayout l = LayoutOf(shape);
    const std::uint32_t blocks = shape.blocks();
    const struct {
      std::uint32_t begin, rows, row_bytes;
    } arrays[] = {{l.key_bits, 32, l.key_row.bits},        {l.key_scales, 32, l.key_row.scale},
                  {l.key_data, 32, l.key_row.data},        {l.value_bits, 32, l.value_row.bits},
                  {l.value_scales, 32, l.value_row.scale}, {l.value_data, 32, l.value_row.data}};
    std::uint32_t end = 0;
    for (const auto& array : arrays) {
      ASSERT_EQ(array.begin, end);
      end += array.rows * array.row_bytes;
    }
    ASSERT_EQ(l.block_bits, 0u);
    ASSERT_EQ(l.block_scales, blocks * l.block_row.bits);
    ASSERT_EQ(l.block_data, l.block_scales + blocks * l.block_row.scale);
  }
}

struct TableRow {
  std::uint16_t head_dim;
  std::uint16_t kept;
  std::uint32_t bf16[3];    // g = 1, 2, 4
  std::uint32_t scaled[3];  // the same for int8 and fp8
};

// The published byte counts of K and V of one entry.
constexpr TableRow kTable[] = {
    {64, 16, {80, 72, 68}, {52, 44, 40}},        {64, 24, {112, 104, 100}, {68, 60, 56}},
    {128, 32, {160, 144, 136}, {100, 84, 76}},   {128, 48, {224, 208, 200}, {132, 116, 108}},
    {256, 64, {320, 288, 272}, {196, 164, 148}}, {256, 96, {448, 416, 400}, {260, 228, 212}},
};

TEST(TileLayout, MatchesThePublishedTable) {
  for (const TableRow& row : kTable) {
    for (int g = 0; g < 3; ++g) {
      for (ValueType type :
           {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8, ValueType::kFp8}) {
        const TileShape shape = {.format = PackedFormat(type),
                                 .head_dim = row.head_dim,
                                 .key = {row.head_dim, row.kept},
                                 .value = {row.head_dim, row.kept},
                                 .group = static_cast<std::uint8_t>(1 << g)};
        ASSERT_EQ(UnsupportedReason(shape), nullptr);
        ASSERT_EQ(LayoutOf(shape).bytes, 32 * (IsScaled(type) ? row.scaled[g] : row.bf16[g]))
            << row.head_dim << " kept " << row.kept << " g " << (1 << g) << ' '
            << ValueTypeName(type);
      }
    }
  }
}

// 160 bytes for K and V, 10 for the block keys and 1 for the rotations, instead of 512: 2.99x.
TEST(TileLayout, MatchesThePublishedRatio) {
  TileShape shape = {.format = TileFormat::kPackedBf16,
                     .key = {128, 32},
                     .value = {128, 32},
                     .summary = Summary::kMean,
                     .block = 8};
  ASSERT_EQ(TileAndSummaryBytes(LayoutOf(shape)), 32 * 170u);
  const double rotations = static_cast<double>(RotationBytes(shape, ElementType::kBf16)) / 65536;
  ASSERT_EQ(rotations, 1.0);
  const double dense = LayoutOf(DenseShape(128, ElementType::kBf16)).bytes / 32.0;
  ASSERT_EQ(dense, 512.0);
  ASSERT_NEAR(dense / (static_cast<double>(TileAndSummaryBytes(LayoutOf(shape))) / 32 + rotations),
              2.994, 0.0005);
  // Quest's summaries of dense tiles cost 6.25 % at 16 entries per block.
  TileShape quest = DenseShape(128, ElementType::kBf16);
  quest.summary = Summary::kMinMax;
  quest.block = 16;
  ASSERT_EQ(TileAndSummaryBytes(LayoutOf(quest)), 32 * 544u);
  // With a quarter of the channels truncated: 152 bytes, 3.37x.
  shape.summary = Summary::kNone;
  shape.block = 0;
  shape.key.channels = shape.value.channels = 96;
  ASSERT_EQ(LayoutOf(shape).bytes, 32 * 152u);
}

TEST(TileLayout, RotationsAreWholeUnits) {
  for (std::uint32_t channels = 1; channels <= 64; ++channels) {
    const TileShape shape = {.format = TileFormat::kPackedBf16,
                             .head_dim = 64,
                             .key = {static_cast<std::uint16_t>(channels), 1},
                             .value = {static_cast<std::uint16_t>(channels), 1}};
    for (ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
      const std::uint64_t bytes = RotationBytes(shape, shape.key, type);
      ASSERT_EQ(bytes % 64, 0u);
      ASSERT_GE(bytes, channels * 64 * ElementBytes(type));
      ASSERT_LT(bytes, channels * 64 * ElementBytes(type) + 64);
    }
    ASSERT_EQ(PaddedChannels(shape), channels <= 32 ? 32u : 64u);
  }
}

TEST(TileShapes, FormatsNameTheirValues) {
  for (std::uint8_t v = 1; v <= 4; ++v) {
    const TileFormat format = PackedFormat(static_cast<ValueType>(v));
    ASSERT_TRUE(IsPacked(format));
    ASSERT_TRUE(IsTileFormat(static_cast<std::uint8_t>(format)));
    ASSERT_EQ(ValuesOf(format), static_cast<ValueType>(v));
  }
  for (std::uint8_t e = 1; e <= 3; ++e) {
    const TileFormat format = DenseFormat(static_cast<ElementType>(e));
    ASSERT_FALSE(IsPacked(format));
    ASSERT_EQ(ElementsOf(format), static_cast<ElementType>(e));
  }
}

// A supported shape with one field changed, and whether it is still supported.
struct Border {
  const char* what;
  void (*change)(TileShape&);
  const char* reason;  // null: supported
};

constexpr TileShape kPacked = {.format = TileFormat::kPackedInt8,
                               .head_dim = 128,
                               .key = {96, 32},
                               .value = {96, 32},
                               .group = 4,
                               .summary = Summary::kMean,
                               .block = 8};

constexpr Border kBorders[] = {
    {"as it is", [](TileShape&) {}, nullptr},
    {"format 0", [](TileShape& s) { s.format = TileFormat{0}; }, "unknown tile format"},
    {"format 9", [](TileShape& s) { s.format = TileFormat{9}; }, "unknown tile format"},
    {"planes without widths", [](TileShape& s) { s.format = TileFormat::kPlanes; },
     "a plane's width is not 2, 4, 6 or 8 bits"},
    {"format 4", [](TileShape& s) { s.format = TileFormat{4}; }, nullptr},
    {"format 7", [](TileShape& s) { s.format = TileFormat{7}; }, nullptr},
    {"head_dim 96", [](TileShape& s) { s.head_dim = 96; }, "head_dim is not 64, 128 or 256"},
    {"head_dim 0", [](TileShape& s) { s.head_dim = 0; }, "head_dim is not 64, 128 or 256"},
    {"head_dim 512", [](TileShape& s) { s.head_dim = 512; }, "head_dim is not 64, 128 or 256"},
    {"group 0", [](TileShape& s) { s.group = 0; }, "group is not 1, 2 or 4"},
    {"group 3", [](TileShape& s) { s.group = 3; }, "group is not 1, 2 or 4"},
    {"group 8", [](TileShape& s) { s.group = 8; }, "group is not 1, 2 or 4"},
    {"key channels 0", [](TileShape& s) { s.key.channels = 0; }, "channels is not in 1..head_dim"},
    {"key channels 132", [](TileShape& s) { s.key.channels = 132; },
     "channels is not in 1..head_dim"},
    {"key channels 128", [](TileShape& s) { s.key.channels = 128; }, nullptr},
    {"key channels 94", [](TileShape& s) { s.key.channels = 94; },
     "channels is not a multiple of group"},
    {"key kept 0", [](TileShape& s) { s.key.kept = 0; }, "kept is not in 1..channels"},
    {"key kept 100", [](TileShape& s) { s.key.kept = 100; }, "kept is not in 1..channels"},
    {"key kept 96", [](TileShape& s) { s.key.kept = 96; }, nullptr},
    {"key kept 4", [](TileShape& s) { s.key.kept = 4; }, nullptr},
    {"key kept 30", [](TileShape& s) { s.key.kept = 30; }, "kept is not a multiple of group"},
    {"value channels 0", [](TileShape& s) { s.value.channels = 0; },
     "channels is not in 1..head_dim"},
    {"value channels 132", [](TileShape& s) { s.value.channels = 132; },
     "channels is not in 1..head_dim"},
    {"value channels 128", [](TileShape& s) { s.value.channels = 128; }, nullptr},
    {"value channels 94", [](TileShape& s) { s.value.channels = 94; },
     "channels is not a multiple of group"},
    {"value kept 0", [](TileShape& s) { s.value.kept = 0; }, "kept is not in 1..channels"},
    {"value kept 100", [](TileShape& s) { s.value.kept = 100; }, "kept is not in 1..channels"},
    {"value kept 96", [](TileShape& s) { s.value.kept = 96; }, nullptr},
    {"value kept 4", [](TileShape& s) { s.value.kept = 4; }, nullptr},
    {"value kept 30", [](TileShape& s) { s.value.kept = 30; }, "kept is not a multiple of group"},
    {"dense with fewer channels", [](TileShape& s) { s.format = TileFormat::kDenseBf16; },
     "a dense row keeps every channel"},
    {"dense with fewer kept",
     [](TileShape& s) {
       s.format = TileFormat::kDenseFp32;
       s.key.channels = s.value.channels = 128;
     },
     "a dense row keeps every channel"},
    {"summary 4", [](TileShape& s) { s.summary = Summary{4}; }, "unknown block summary"},
    {"no summary", [](TileShape& s) { s.summary = Summary::kNone; },
     "block size without summary, or summary without block size"},
    {"no block", [](TileShape& s) { s.block = 0; },
     "block size without summary, or summary without block size"},
    {"block 32", [](TileShape& s) { s.block = 32; }, "block is not 4, 8 or 16"},
    {"block 2", [](TileShape& s) { s.block = 2; }, "block is not 4, 8 or 16"},
    {"block 4", [](TileShape& s) { s.block = 4; }, nullptr},
    {"block 16", [](TileShape& s) { s.block = 16; }, nullptr},
};

TEST(TileShapes, WhyNotServedAtEveryBorder) {
  for (const Border& border : kBorders) {
    TileShape shape = kPacked;
    border.change(shape);
    const char* reason = UnsupportedReason(shape);
    if (border.reason == nullptr) {
      ASSERT_EQ(reason, nullptr) << border.what << ": " << reason;
    } else {
      ASSERT_NE(reason, nullptr) << border.what;
      ASSERT_STREQ(reason, border.reason) << border.what;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
