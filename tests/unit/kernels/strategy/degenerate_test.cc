// Degenerate lanes that no real model should have.
#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/strategy/strategy.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

Matrix Times(Matrix rows, double factor) {
  for (auto& row : rows) {
    for (double& x : row) x *= factor;
  }
  return rows;
}

// A supported shape, finite orthonormal rotations, and losses between 0 and 1.
void ExpectSound(const Strategy& strategy) {
  const TileShape& shape = strategy.shape;
  EXPECT_EQ(UnsupportedReason(shape), nullptr);
  const double rounding = strategy.rotation_type == ElementType::kBf16 ? 1e-2 : 1e-5;
  for (const double loss : {strategy.loss.key, strategy.loss.value}) {
    EXPECT_GE(loss, -rounding);
    EXPECT_LE(loss, 1);
  }
  EXPECT_GE(strategy.block_variance, 0);
  EXPECT_LE(strategy.block_variance, 1);
  ASSERT_EQ(strategy.rotation_type, ElementType::kFp32);
  for (const std::byte* matrix : {strategy.view().key, strategy.view().value}) {
    std::vector<float> elements(std::size_t{shape.key.channels} * shape.head_dim);
    std::memcpy(elements.data(), matrix, elements.size() * sizeof(float));
    for (std::uint32_t a = 0; a < shape.key.channels; ++a) {
      for (std::uint32_t b = a; b < shape.key.channels; ++b) {
        double dot = 0;
        for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
          dot += double{elements[a * shape.head_dim + d]} * elements[b * shape.head_dim + d];
        }
        ASSERT_NEAR(dot, a == b ? 1 : 0, 1e-5) << a << ", " << b;
      }
    }
  }
}

Strategy MakeSound(const Matrix& rows, ElementType type = ElementType::kFp32) {
  const TestLane lane(rows, rows, type);
  const Strategy strategy = lane.Make({.rotation_type = ElementType::kFp32});
  ExpectSound(strategy);
  return strategy;
}

TEST(Degenerate, AFewRows) {
  TestRandom random;
  for (const std::size_t rows : {2, 3, 31, 32, 33, 63, 64, 65}) {
    MakeSound(Normal(random, rows, random.Pick(kHeadDims)));
  }
}

TEST(Degenerate, OneRow) {
  TestRandom random;
  const Strategy strategy = MakeSound(Normal(random, 1, 128));
  EXPECT_TRUE(strategy.within_threshold);  // on this sample: one vector holds everything
  EXPECT_EQ(strategy.shape.key.kept, 16);
  EXPECT_EQ(strategy.shape.group, 4);
  EXPECT_NEAR(strategy.loss.key, 0, 1e-5);
}

TEST(Degenerate, Zeros) {
  const Strategy strategy = MakeSound(Matrix(100, std::vector<double>(128)));
  EXPECT_TRUE(strategy.within_threshold);
  EXPECT_EQ(strategy.shape.key.kept, 16);
  EXPECT_EQ(strategy.loss.key, 0);
  EXPECT_EQ(strategy.shape.block, 16);
}

TEST(Degenerate, EqualRows) {
  TestRandom random;
  const Strategy strategy = MakeSound(Matrix(200, Normal(random, 1, 128)[0]));
  EXPECT_TRUE(strategy.within_threshold);
  EXPECT_EQ(strategy.shape.key.kept, 16);
  EXPECT_NEAR(strategy.loss.key, 0, 1e-5);
  EXPECT_EQ(strategy.shape.block, 16);
}

// Rows that differ only by a factor give the same strategy.
TEST(Degenerate, HugeRows) {
  TestRandom random;
  const Matrix rows = PowerLaw(random, 300, 64, 0.7);
  const Strategy huge = MakeSound(Times(rows, 0x1p60));
  const Strategy usual = MakeSound(rows);
  EXPECT_EQ(huge.shape, usual.shape);
  EXPECT_NEAR(huge.loss.key, usual.loss.key, 1e-3);
  EXPECT_NEAR(huge.block_variance, usual.block_variance, 1e-5);
}

// One rotated channel then holds a value whose square overflows fp32.
TEST(Degenerate, HugeEqualRows) {
  TestRandom random;
  std::vector<double> row(128);
  for (double& x : row) x = random.OneIn(2) ? 0x1p62 : -0x1p62;
  const Strategy strategy = MakeSound(Matrix(100, row));
  EXPECT_TRUE(strategy.within_threshold);
  EXPECT_NEAR(strategy.loss.key, 0, 1e-5);
  EXPECT_EQ(strategy.shape.block, 16);
}

// Their products are 0 in fp32, so moments are zero; losses are still right.
TEST(Degenerate, TinyRows) {
  TestRandom random;
  const Matrix rows = Times(Normal(random, 300, 64), 1e-30);
  const Strategy strategy = MakeSound(rows);
  EXPECT_FALSE(strategy.within_threshold);
  const TestLane lane(rows, rows, ElementType::kFp32);
  const Loss loss = LossUnder(lane.rows(), strategy.shape, strategy.view(), BestOperations());
  EXPECT_NEAR(loss.key, strategy.loss.key, 0.02);
  EXPECT_GT(loss.key, 0.1);
  EXPECT_LT(loss.key, 0.5);  // the strongest three eighths of white noise
}

TEST(Degenerate, OneRowAmongZeros) {
  TestRandom random;
  Matrix rows(150, std::vector<double>(64));
  rows[random.Below(rows.size())] = Normal(random, 1, 64)[0];
  const Strategy strategy = MakeSound(rows, ElementType::kBf16);
  EXPECT_LE(strategy.loss.key, 1.0 / 40);
}

}  // namespace
}  // namespace tessera::kernels
