#include "kernels/strategy/moments.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/reference/attend_part.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

// Some implementations sum up to 32 products in fp32.
void ExpectSums(const Moments& moments, const Matrix& expected) {
  const std::uint32_t n = moments.head_dim();
  for (std::uint32_t i = 0; i < n; ++i) {
    for (std::uint32_t j = 0; j < n; ++j) {
      const double got = moments.sums()[std::size_t{i} * n + j];
      if (j < i) {
        ASSERT_EQ(got, 0) << i << ", " << j << " is below the diagonal";
      } else {
        const double scale = std::sqrt(expected[i][i] * expected[j][j]);
        ASSERT_NEAR(got, expected[i][j], 1e-5 * scale) << i << ", " << j;
      }
    }
  }
}

TEST(Moments, AreTheSumsOfProducts) {
  TestRandom random;
  for (const std::uint32_t head_dim : kHeadDims) {
    for (const ElementType type : kTypes) {
      const StoredRows rows(Normal(random, random.Between(1, 150), head_dim), type);
      for (const Operations* operations : {&ReferenceOperations(), &BestOperations()}) {
        Moments moments(head_dim);
        moments.Add(rows.span(), *operations);
        EXPECT_EQ(moments.rows(), rows.span().count);
        EXPECT_EQ(moments.bytes(), std::size_t{head_dim} * head_dim * sizeof(double));
        ExpectSums(moments, plain::SecondMoments(rows.all()));
      }
    }
  }
}

TEST(Moments, OfPartsAddUp) {
  TestRandom random;
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t head_dim = random.Pick(kHeadDims);
    const StoredRows rows(Normal(random, 200, head_dim), ElementType::kBf16);
    Moments moments(head_dim);
    Moments others(head_dim);
    for (std::uint64_t done = 0; done < 200;) {
      const std::uint64_t count = random.Between(0, std::min<std::uint64_t>(200 - done, 70));
      (random.OneIn(2) ? moments : others).Add(rows.span().Slice(done, count), BestOperations());
      done += count;
    }
    moments.Add(others);
    EXPECT_EQ(moments.rows(), 200u);
    ExpectSums(moments, plain::SecondMoments(rows.all()));
  }
}

TEST(Moments, OfHugeRowsAreFinite) {
  TestRandom random;
  Matrix rows = Normal(random, 40, 64);
  for (auto& row : rows) {
    for (double& x : row) x *= 1e18;
  }
  const StoredRows stored(rows, ElementType::kFp32);
  Moments moments(64);
  moments.Add(stored.span(), BestOperations());
  ExpectSums(moments, plain::SecondMoments(stored.all()));
}

}  // namespace
}  // namespace tessera::kernels
