#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/attend_part.h"
#include "kernels/reference/tile_row.h"
#include "kernels/strategy/reduce/channels.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

// A packed tile of random rows, and the arguments to reduce its channels.
struct DrawnTile {
  TileShape shape;
  std::uint32_t rows;
  std::vector<std::byte> bytes;
  std::vector<std::byte> summaries;
};

DrawnTile Draw(TestRandom& random) {
  constexpr ValueType kValues[] = {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8,
                                   ValueType::kFp8};
  constexpr Summary kSummaries[] = {Summary::kNone, Summary::kMean, Summary::kMinMax};
  constexpr std::uint32_t kGroups[] = {1, 2, 4};
  constexpr std::uint8_t kBlocks[] = {4, 8, 16};
  const std::uint32_t head_dim = random.OneIn(2) ? 64 : 128;
  const std::uint32_t group = random.Pick(kGroups);
  const auto row = [&] {
    const auto channels = static_cast<std::uint16_t>(head_dim - (random.OneIn(2) ? 16 : 0));
    const auto kept =
        static_cast<std::uint16_t>(random.OneIn(4) ? channels : 8 + 4 * random.Below(8));
    return RowShape{.channels = channels, .kept = kept};
  };
  TileShape shape = {.format = PackedFormat(random.Pick(kValues)),
                     .head_dim = static_cast<std::uint16_t>(head_dim),
                     .key = row(),
                     .value = row(),
                     .group = static_cast<std::uint8_t>(group),
                     .summary = random.Pick(kSummaries),
                     .weights = random.OneIn(2),
                     .positions = random.OneIn(2)};
  if (shape.summary != Summary::kNone) shape.block = random.Pick(kBlocks);
  DrawnTile tile = {shape, static_cast<std::uint32_t>(random.Between(1, kTileEntries)),
                    std::vector<std::byte>(LayoutOf(shape).bytes),
                    std::vector<std::byte>(LayoutOf(shape).summary_bytes)};

  const StoredRows keys(Normal(random, tile.rows, head_dim), ElementType::kFp32);
  const StoredRows values(Normal(random, tile.rows, head_dim), ElementType::kFp32);
  const std::vector<float> identity = [&] {
    std::vector<float> matrix(std::size_t{head_dim} * head_dim);
    for (std::uint32_t d = 0; d < head_dim; ++d) matrix[d * head_dim + d] = 1;
    return matrix;
  }();
  const auto* const matrix = reinterpret_cast<const std::byte*>(identity.data());
  const Operations& reference = ReferenceOperations();
  std::vector<std::byte> prepared(reference.prepared_bytes(shape, ElementType::kFp32));
  reference.prepare_encode(shape, ElementType::kFp32,
                           {.key = matrix, .value = matrix, .type = ElementType::kFp32},
                           prepared.data());
  std::vector<float> weights(tile.rows);
  for (float& weight : weights) weight = static_cast<float>(random.Between(1, 9));
  std::vector<std::uint32_t> positions(tile.rows);
  for (std::uint32_t i = 0; i < tile.rows; ++i) positions[i] = 3 * i;
  EXPECT_TRUE(reference.encode({.key = keys.span().data,
                                .value = values.span().data,
                                .stride = keys.span().row_bytes(),
                                .type = ElementType::kFp32,
                                .rows = tile.rows,
                                .weights = shape.weights ? weights.data() : nullptr,
                                .positions = shape.positions ? positions.data() : nullptr,
                                .shape = shape,
                                .layout = LayoutOf(shape),
                                .prepared = prepared.data(),
                                .tile = tile.bytes.data(),
                                .summaries = tile.summaries.data()}));
  return tile;
}

std::vector<double> Read(const StoredRow& row) {
  std::vector<double> elements(2 * kMaxChannels);
  ReadRow(row, elements.data());
  elements.resize(row.channels);
  return elements;
}

// A row reduced to `kept` channels: its strongest groups, of equal ones the first. Groups whose
// stored values are all zero may be kept or not.
std::vector<double> LeftOf(const std::vector<double>& row, std::uint32_t group,
                           std::uint32_t kept) {
  std::vector<std::size_t> groups(row.size() / group);
  std::iota(groups.begin(), groups.end(), 0);
  const auto strength = [&](std::size_t g) {
    double sum = 0;
    for (std::uint32_t i = 0; i < group; ++i) sum += row[g * group + i] * row[g * group + i];
    return sum;
  };
  std::stable_sort(groups.begin(), groups.end(),
                   [&](std::size_t a, std::size_t b) { return strength(a) > strength(b); });
  std::vector<double> left(row.size());
  for (std::uint32_t i = 0; i < kept / group; ++i) {
    for (std::uint32_t c = 0; c < group; ++c) {
      left[groups[i] * group + c] = row[groups[i] * group + c];
    }
  }
  return left;
}

std::uint32_t GroupsNamed(const StoredRow& row) {
  std::uint32_t count = 0;
  for (std::uint32_t g = 0; g < row.channels / row.group; ++g) {
    count += static_cast<std::uint8_t>(row.bits[g / 8]) >> (g % 8) & 1;
  }
  return count;
}

double SquaredLength(const std::vector<double>& row) {
  return std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
}

// Compares a row before and after. Returns the share of its squared length that is left.
double ExpectThinned(const StoredRow& before, const StoredRow& after) {
  const std::vector<double> was = Read(before);
  const std::vector<double> is = Read(after);
  EXPECT_EQ(is, LeftOf(was, before.group, after.kept));
  if (after.bits != nullptr) {
    EXPECT_EQ(GroupsNamed(after), after.kept / after.group);
  }
  return SquaredLength(was) == 0 ? 1 : SquaredLength(is) / SquaredLength(was);
}

TEST(ReduceTile, KeepsTheStrongestOfWhatThereIs) {
  TestRandom random;
  int thinned_tiles = 0;
  for (int round = 0; round < 200; ++round) {
    const DrawnTile tile = Draw(random);
    constexpr double kShares[] = {0.01, 0.0625, 0.125, 0.25, 0.4};
    const std::optional<TileShape> shape = ReducedShape(tile.shape, random.Pick(kShares));
    if (!shape.has_value()) continue;
    ++thinned_tiles;
    const TileLayout from = LayoutOf(tile.shape);
    const TileLayout to = LayoutOf(*shape);
    ASSERT_LT(TileAndSummaryBytes(to), TileAndSummaryBytes(from));
    ASSERT_EQ(UnsupportedReason(*shape), nullptr);
    std::vector<std::byte> thinned(to.bytes, std::byte{0xff});
    std::vector<std::byte> thinned_summaries(to.summary_bytes, std::byte{0xff});
    const Stays stays = ReduceTile({.from = tile.shape,
                                    .tile = tile.bytes.data(),
                                    .summaries = tile.summaries.data(),
                                    .rows = tile.rows,
                                    .to = *shape,
                                    .thinned = thinned.data(),
                                    .thinned_summaries = thinned_summaries.data()});
    double key = 0;
    double value = 0;
    for (std::uint32_t row = 0; row < tile.rows; ++row) {
      key += ExpectThinned(KeyRow(tile.shape, from, tile.bytes.data(), row),
                           KeyRow(*shape, to, thinned.data(), row));
      value += ExpectThinned(ValueRow(tile.shape, from, tile.bytes.data(), row),
                             ValueRow(*shape, to, thinned.data(), row));
      EXPECT_EQ(WeightOf(*shape, to, thinned.data(), row),
                WeightOf(tile.shape, from, tile.bytes.data(), row));
      EXPECT_EQ(PositionOf(*shape, to, thinned.data(), 100, row),
                PositionOf(tile.shape, from, tile.bytes.data(), 100, row));
    }
    EXPECT_NEAR(stays.key, key / tile.rows, 1e-9);
    EXPECT_NEAR(stays.value, value / tile.rows, 1e-9);
    // Unused rows are zero, as in any tile.
    for (std::uint32_t row = tile.rows; row < kTileEntries; ++row) {
      EXPECT_EQ(SquaredLength(Read(KeyRow(*shape, to, thinned.data(), row))), 0);
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(thinned_tiles, 60);
}

TEST(ReduceTile, BlocksSumUpWhatIsLeft) {
  TestRandom random;
  int means = 0;
  int bounds = 0;
  for (int round = 0; round < 300; ++round) {
    const DrawnTile tile = Draw(random);
    const std::optional<TileShape> shape = ReducedShape(tile.shape, 0.0625);
    if (!shape.has_value() || shape->summary == Summary::kNone) continue;
    const TileLayout from = LayoutOf(tile.shape);
    const TileLayout to = LayoutOf(*shape);
    std::vector<std::byte> thinned(to.bytes);
    std::vector<std::byte> summaries(to.summary_bytes);
    ReduceTile({tile.shape, tile.bytes.data(), tile.summaries.data(), tile.rows, *shape,
                thinned.data(), summaries.data()});
    for (std::uint32_t b = 0; b * tile.shape.block < tile.rows; ++b) {
      const StoredRow before = BlockRow(tile.shape, from, tile.summaries.data(), b);
      const StoredRow after = BlockRow(*shape, to, summaries.data(), b);
      if (shape->summary == Summary::kMean) {
        ++means;
        ExpectThinned(before, after);
        continue;
      }
      ++bounds;
      const std::vector<double> is = Read(after);
      const std::uint32_t channels = shape->key.channels;
      ASSERT_EQ(is.size(), 2 * channels);
      for (std::uint32_t e = b * shape->block;
           e < std::min<std::uint32_t>((b + 1) * shape->block, tile.rows); ++e) {
        const std::vector<double> key = Read(KeyRow(*shape, to, thinned.data(), e));
        for (std::uint32_t c = 0; c < channels; ++c) {
          EXPECT_LE(is[c], key[c]);
          EXPECT_GE(is[channels + c], key[c]);
        }
      }
    }
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(means, 50);
  EXPECT_GT(bounds, 50);
}

TEST(ReducedShape, IsNoneWhereNothingBecomesSmaller) {
  const TileShape quarter = {
      .format = TileFormat::kPackedBf16, .key = {128, 32}, .value = {128, 32}, .group = 4};
  EXPECT_FALSE(ReducedShape(quarter, 0.25).has_value());
  EXPECT_FALSE(ReducedShape(quarter, 0.9).has_value());
  EXPECT_FALSE(ReducedShape(DenseShape(128, ElementType::kBf16), 0.125).has_value());
  const std::optional<TileShape> least = ReducedShape(quarter, 0.001);
  ASSERT_TRUE(least.has_value());
  EXPECT_EQ(least->key.kept, 4);  // one group
  // Reduces only one side, if the other has no more channels than that.
  TileShape uneven = quarter;
  uneven.value.kept = 8;
  const std::optional<TileShape> even = ReducedShape(uneven, 0.125);
  ASSERT_TRUE(even.has_value());
  EXPECT_EQ(even->key.kept, 16);
  EXPECT_EQ(even->value.kept, 8);
}

}  // namespace
}  // namespace tessera::kernels
