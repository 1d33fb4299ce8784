#include "kernels/strategy/loss.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/attend_part.h"
#include "kernels/strategy/strategy.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

// A matrix of a strategy as stored.
Matrix StoredMatrix(const Strategy& strategy, bool value) {
  const TileShape& shape = strategy.shape;
  const RotationView view = strategy.view();
  Matrix rows;
  const std::byte* from = value ? view.value : view.key;
  for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
    rows.emplace_back();
    for (std::uint32_t d = 0; d < shape.head_dim; ++d, from += ElementBytes(view.type)) {
      float element;
      std::uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      if (view.type == ElementType::kFp32) {
        std::memcpy(&element, from, sizeof(element));
      } else {
        element = view.type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
      }
      rows.back().push_back(element);
    }
  }
  return rows;
}

StrategyOptions OneCandidate(TestRandom& random) {
  constexpr double kShares[] = {0.125, 0.25, 0.375, 0.6};
  constexpr std::uint32_t kGroups[] = {1, 2, 4};
  constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
  constexpr ValueType kValues[] = {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8,
                                   ValueType::kFp8};
  return {.kept = {random.Pick(kShares)},
          .groups = {random.Pick(kGroups)},
          .truncated = random.OneIn(2) ? 0.25 : 0.0,
          .values = random.Pick(kValues),
          .rotation_type = random.Pick(kTypes)};
}

TEST(LossUnder, IsThatOfItsDefinition) {
  TestRandom random;
  for (int round = 0; round < 12; ++round) {
    const std::uint32_t head_dim = random.OneIn(2) ? 64 : 128;
    const TestLane made_from(PowerLaw(random, 300, head_dim, 0.7),
                             PowerLaw(random, 300, head_dim, 0.35), ElementType::kBf16);
    const Strategy strategy = made_from.Make(OneCandidate(random));
    const std::size_t count = random.Between(1, 100);
    Matrix keys = PowerLaw(random, count, head_dim, 0.5);
    keys[random.Below(count)].assign(head_dim, 0.0);  // counts with loss 0
    const TestLane rows(keys, PowerLaw(random, count, head_dim, 0.3), ElementType::kBf16);
    for (const Operations* operations : {&ReferenceOperations(), &BestOperations()}) {
      const Loss loss = LossUnder(rows.rows(), strategy.shape, strategy.view(), *operations);
      const auto expected = [&](const StoredRows& side, bool value) {
        return plain::MeanLoss(StoredMatrix(strategy, value), side.all(), strategy.shape.key.kept,
                               strategy.shape.group);
      };
      EXPECT_NEAR(loss.key, expected(rows.keys, false), 1e-5);
      EXPECT_NEAR(loss.value, expected(rows.values, true), 1e-5);
    }
  }
}

// The rows as packed by the reference.
std::vector<std::byte> Encode(const LaneRows& rows, const Strategy& strategy) {
  const Operations& reference = ReferenceOperations();
  const TileLayout layout = LayoutOf(strategy.shape);
  std::vector<std::byte> prepared(reference.prepared_bytes(strategy.shape, rows.keys.type));
  reference.prepare_encode(strategy.shape, rows.keys.type, strategy.view(), prepared.data());
  std::vector<std::byte> tile(TileAndSummaryBytes(layout));
  EXPECT_TRUE(reference.encode({.key = rows.keys.data,
                                .value = rows.values.data,
                                .stride = rows.keys.row_bytes(),
                                .type = rows.keys.type,
                                .rows = static_cast<std::uint32_t>(rows.keys.count),
                                .shape = strategy.shape,
                                .layout = layout,
                                .prepared = prepared.data(),
                                .tile = tile.data(),
                                .summaries = SummariesAfter(tile.data(), layout)}));
  return tile;
}

// The maximum relative change of a row's energy by rounding its values.
double EnergyRounding(ValueType values) {
  switch (values) {
    case ValueType::kBf16:
      return 2.1 * 0x1p-8;
    case ValueType::kFp16:
      return 2.1 * 0x1p-11;
    case ValueType::kInt8:  // half a step of peak / 127 in each of up to 77 values
      return 2.1 * std::sqrt(77.0) * 0.5 / 127;
    case ValueType::kFp8:
      return 2.1 * 0x1p-4;
  }
  return 0;
}

TEST(LossOfTile, IsLossUnderButForTheRoundingOfValues) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    const std::uint32_t head_dim = random.OneIn(2) ? 64 : 128;
    const std::size_t count = random.OneIn(2) ? 32 : random.Between(1, 32);
    Matrix keys = PowerLaw(random, count, head_dim, 0.7);
    keys[random.Below(count)].assign(head_dim, 0.0);
    const TestLane lane(keys, PowerLaw(random, count, head_dim, 0.35), ElementType::kBf16);
    const StrategyOptions options = OneCandidate(random);
    const Strategy strategy = lane.Make(options);
    SCOPED_TRACE(std::string(ValueTypeName(options.values)) + ", kept " +
                 std::to_string(strategy.shape.key.kept));
    const std::vector<std::byte> tile = Encode(lane.rows(), strategy);
    for (const Operations* operations : {&ReferenceOperations(), &BestOperations()}) {
      const Loss under = LossUnder(lane.rows(), strategy.shape, strategy.view(), *operations);
      const Loss stored = LossOfTile(lane.rows(), strategy.shape, tile.data(), *operations);
      EXPECT_NEAR(stored.key, under.key, EnergyRounding(options.values));
      EXPECT_NEAR(stored.value, under.value, EnergyRounding(options.values));
    }
  }
}

TEST(Loss, OfZerosIsZero) {
  const TestLane lane(Matrix(20, std::vector<double>(64)), Matrix(20, std::vector<double>(64)),
                      ElementType::kBf16);
  const Strategy strategy = lane.Make({.kept = {0.25}});
  const Loss under = LossUnder(lane.rows(), strategy.shape, strategy.view(), BestOperations());
  EXPECT_EQ(under.key, 0);
  EXPECT_EQ(under.value, 0);
  const std::vector<std::byte> tile = Encode(lane.rows(), strategy);
  const Loss stored = LossOfTile(lane.rows(), strategy.shape, tile.data(), BestOperations());
  EXPECT_EQ(stored.key, 0);
  EXPECT_EQ(stored.value, 0);
}

// Without a rotation a row keeps its strongest raw channels; a dense row keeps all.
TEST(Loss, NeedsNoRotation) {
  Matrix rows(1, std::vector<double>(64));
  rows[0][3] = 2;
  rows[0][60] = -1;
  rows[0][61] = 1;
  const TestLane lane(rows, rows, ElementType::kFp32);
  const TileShape shape = {.format = TileFormat::kPackedBf16,
                           .head_dim = 64,
                           .key = {64, 2},
                           .value = {64, 2},
                           .group = 2};
  EXPECT_NEAR(LossUnder(lane.rows(), shape, {}, BestOperations()).key, 2.0 / 6, 1e-6);
  EXPECT_NEAR(LossUnder(lane.rows(), DenseShape(64, ElementType::kBf16), {}, BestOperations()).key,
              0, 1e-6);
}

}  // namespace
}  // namespace tessera::kernels
