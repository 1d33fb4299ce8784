#include "kernels/dispatch/merge.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/numerics.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kMergedDim = 64;

struct Side {
  std::vector<float> output;
  std::vector<float> lse;

  bool operator==(const Side& other) const {
    return std::memcmp(output.data(), other.output.data(), output.size() * 4) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
  }
};

Side RandomSide(std::uint32_t rows, TestRandom& random) {
  const auto number = [&] { return static_cast<float>(random.Bits() >> 40) * 0x1p-23f - 1; };
  Side side;
  for (std::uint32_t i = 0; i < rows * kMergedDim; ++i) side.output.push_back(number());
  for (std::uint32_t i = 0; i < rows; ++i) side.lse.push_back(10 * number());
  return side;
}

void Merge(Side& into, const Side& other) {
  MergeOutputs({.rows = static_cast<std::uint32_t>(into.lse.size()), .head_dim = kMergedDim},
               {.output = into.output.data(), .lse = into.lse.data()},
               {.output = other.output.data(), .lse = other.lse.data()});
}

// The output of a neutral side is not read, so it may hold anything.
Side Neutral(std::uint32_t rows) {
  return {.output = std::vector<float>(rows * kMergedDim, std::nanf("")),
          .lse = std::vector<float>(rows, -kInfinity)};
}

TEST(MergeOutputs, NeutralLeavesTheOtherBitForBit) {
  TestRandom random;
  const Side side = RandomSide(5, random);
  Side merged = side;
  Merge(merged, Neutral(5));
  EXPECT_EQ(merged, side);
  merged = Neutral(5);
  Merge(merged, side);
  EXPECT_EQ(merged, side);
  merged = Neutral(5);
  Merge(merged, Neutral(5));
  EXPECT_EQ(merged.lse, Neutral(5).lse);
}

TEST(MergeOutputs, FollowsTheDefinition) {
  TestRandom random;
  const Side a = RandomSide(50, random);
  const Side b = RandomSide(50, random);
  Side merged = a;
  Merge(merged, b);
  for (std::uint32_t r = 0; r < 50; ++r) {
    const double wa = std::exp(static_cast<double>(a.lse[r]));
    const double wb = std::exp(static_cast<double>(b.lse[r]));
    EXPECT_NEAR(merged.lse[r], std::log(wa + wb), 1e-6);
    for (std::uint32_t c = r * kMergedDim; c < (r + 1) * kMergedDim; ++c) {
      EXPECT_NEAR(merged.output[c], (wa * a.output[c] + wb * b.output[c]) / (wa + wb), 1e-7);
    }
  }
}

TEST(MergeOutputs, CommutesBitForBit) {
  TestRandom random;
  const Side a = RandomSide(50, random);
  const Side b = RandomSide(50, random);
  Side ab = a;
  Merge(ab, b);
  Side ba = b;
  Merge(ba, a);
  EXPECT_EQ(ab, ba);
}

TEST(MergeOutputs, FarApartSidesDoNotOverflow) {
  TestRandom random;
  Side a = RandomSide(1, random);
  Side b = RandomSide(1, random);
  a.lse[0] = 3e38f;
  b.lse[0] = -3e38f;
  Side merged = b;
  Merge(merged, a);
  EXPECT_EQ(merged, a);
}

TEST(Numerics, Exp2) {
  TestRandom random;
  for (int i = 0; i < 200000; ++i) {
    const double x = static_cast<double>(random.Bits() >> 11) * 0x1p-53 * 2046 - 1022;
    ASSERT_NEAR(Exp2(x) / std::exp2(x), 1, 1e-15) << x;
  }
  for (int n = -1022; n < 1024; ++n) ASSERT_EQ(Exp2(n), std::ldexp(1.0, n));
  EXPECT_EQ(Exp2(-1e300), 0);
  EXPECT_EQ(Exp2(-kInfinity), 0);
  EXPECT_EQ(Exp2(2000), kInfinity);
  EXPECT_TRUE(std::isnan(Exp2(std::nan(""))));
}

TEST(Numerics, Ln) {
  TestRandom random;
  for (int i = 0; i < 200000; ++i) {
    const double x = std::bit_cast<double>(random.Below(0x7ff0000000000000u) + 1);
    if (!std::isfinite(x)) continue;
    ASSERT_NEAR(Ln(x), std::log(x), 1e-15 + std::fabs(std::log(x)) * 1e-15) << x;
  }
  EXPECT_EQ(Ln(1), 0);
  EXPECT_EQ(Ln(0), -kInfinity);
  EXPECT_TRUE(std::isnan(Ln(std::nan(""))));
}

}  // namespace
}  // namespace tessera::kernels
