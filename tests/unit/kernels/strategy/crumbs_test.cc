#include "kernels/strategy/reduce/crumbs.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/tile_row.h"
#include "kernels/strategy/book.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

struct CodedTile {
  TileShape shape;
  std::uint32_t rows;
  AlignedBytes bytes;
  AlignedBytes summaries;
};

CodedTile Draw(TestRandom& random, const TileShape& shape) {
  CodedTile tile = {shape, static_cast<std::uint32_t>(random.Between(1, kTileEntries)),
                    AlignedBytes(LayoutOf(shape).bytes),
                    AlignedBytes(LayoutOf(shape).summary_bytes)};
  const std::uint32_t dim = shape.head_dim;
  const TestLane lane(PowerLaw(random, 2 * dim, dim, 0.5), Normal(random, 2 * dim, dim),
                      ElementType::kBf16);
  const Book book = MakeBook(
      lane.rows(), {.key = shape.key_planes.planes(), .value = shape.value_planes.planes()},
      BestOperations());
  AlignedBytes prepared(BestOperations().prepared_bytes(shape, ElementType::kBf16));
  BestOperations().prepare_encode(shape, ElementType::kBf16, book.view(), prepared.data());
  std::vector<float> weights(tile.rows, 2);
  std::vector<std::uint32_t> positions(tile.rows);
  for (std::uint32_t i = 0; i < tile.rows; ++i) positions[i] = 3 * i;
  const LaneRows rows = lane.rows();
  EXPECT_TRUE(BestOperations().encode({.key = rows.keys.data,
                                       .value = rows.values.data,
                                       .stride = rows.keys.row_bytes(),
                                       .type = ElementType::kBf16,
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

std::vector<double> Keys(const TileShape& shape, const std::byte* tile, std::uint32_t row) {
  std::vector<double> elements(kMaxChannels);
  ReadKey(shape, LayoutOf(shape), tile, row, elements.data());
  elements.resize(shape.head_dim);
  return elements;
}

std::vector<double> Values(const TileShape& shape, const std::byte* tile, std::uint32_t row) {
  std::vector<double> elements(kMaxChannels);
  ReadValue(shape, LayoutOf(shape), tile, row, elements.data());
  elements.resize(shape.head_dim);
  return elements;
}

// The scale of a key's first plane.
double ScaleOf(const TileShape& shape, const std::byte* tile, std::uint32_t row) {
  const QuadLayout quad = LayoutOf(shape).quad;
  std::uint16_t scale;
  std::memcpy(
      &scale,
      tile + row / kQuadRows * quad.bytes + quad.key_scales + row % kQuadRows * sizeof scale,
      sizeof scale);
  return Bf16ToFloat(scale);
}

TEST(Crumbs, KeepTheUpperFourBitsOfEachCode) {
  TestRandom random;
  for (const std::uint32_t dim : {64u, 128u, 256u}) {
    for (const std::uint8_t second : {std::uint8_t{4}, std::uint8_t{2}}) {
      TileShape shape = PlanesShape(dim, {6, second}, {4, 0});
      shape.weights = random.OneIn(2);
      shape.positions = random.OneIn(2);
      if (random.OneIn(2)) shape = WithSigns(shape);
      const CodedTile tile = Draw(random, shape);
      const std::optional<TileShape> shorter = ShapeWithoutCrumbs(shape);
      ASSERT_TRUE(shorter.has_value());
      EXPECT_EQ(shorter->key_planes, (PlaneWidths{4, second}));
      AlignedBytes thinned(LayoutOf(*shorter).bytes);
      AlignedBytes summaries(LayoutOf(*shorter).summary_bytes);
      const Stays stays = DropCrumbs({.from = shape,
                                      .tile = tile.bytes.data(),
                                      .summaries = tile.summaries.data(),
                                      .rows = tile.rows,
                                      .to = *shorter,
                                      .thinned = thinned.data(),
                                      .thinned_summaries = summaries.data()},
                                     BestOperations());
      double energy = 0;
      double changed = 0;
      for (std::uint32_t row = 0; row < tile.rows; ++row) {
        const std::vector<double> before = Keys(shape, tile.bytes.data(), row);
        const std::vector<double> after = Keys(*shorter, thinned.data(), row);
        const double scale = ScaleOf(shape, tile.bytes.data(), row);
        for (std::uint32_t c = 0; c < dim; ++c) {
          double expected = before[c];
          if (c < dim / 2) {
            const double code = std::round(before[c] / scale + 31.5);
            expected = 4 * scale * (std::floor(code / 4) - 7.5);
          }
          ASSERT_FLOAT_EQ(after[c], expected) << "row " << row << " channel " << c;
          energy += before[c] * before[c];
          changed += (after[c] - before[c]) * (after[c] - before[c]);
        }
        ASSERT_EQ(Values(*shorter, thinned.data(), row), Values(shape, tile.bytes.data(), row));
      }
      EXPECT_NEAR(stays.key, 1 - changed / energy, 1e-6);
      EXPECT_LT(stays.key, 1);
      EXPECT_EQ(stays.value, 1);
      EXPECT_EQ(summaries, tile.summaries);
      const TileLayout from = LayoutOf(shape);
      const TileLayout to = LayoutOf(*shorter);
      EXPECT_EQ(from.bytes - from.weights, to.bytes - to.weights);
      EXPECT_EQ(std::memcmp(thinned.data() + to.weights, tile.bytes.data() + from.weights,
                            to.bytes - to.weights),
                0);
    }
  }
}

TEST(Crumbs, AreInSixBitCodesOfKeysOnly) {
  EXPECT_FALSE(ShapeWithoutCrumbs(PlanesShape(128, {8, 4}, {6, 0})).has_value());
  EXPECT_FALSE(ShapeWithoutCrumbs(PlanesShape(128, {4, 4}, {4, 0})).has_value());
  EXPECT_FALSE(ShapeWithoutCrumbs(DenseShape(128, ElementType::kBf16)).has_value());
}

}  // namespace
}  // namespace tessera::kernels
