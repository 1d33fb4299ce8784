#include "kernels/strategy/eigen.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "tests/unit/kernels/strategy/plain.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

Moments MomentsOf(const StoredRows& rows) {
  Moments moments(rows.span().head_dim);
  moments.Add(rows.span(), BestOperations());
  return moments;
}

double SumAt(const Moments& moments, std::uint32_t i, std::uint32_t j) {
  return moments.sums()[std::size_t{std::min(i, j)} * moments.head_dim() + std::max(i, j)];
}

void ExpectOrthonormal(const Eigenbasis& basis) {
  const std::uint32_t n = basis.head_dim;
  for (std::uint32_t a = 0; a < n; ++a) {
    for (std::uint32_t b = a; b < n; ++b) {
      double dot = 0;
      for (std::uint32_t d = 0; d < n; ++d) dot += basis.vector(a)[d] * basis.vector(b)[d];
      ASSERT_NEAR(dot, a == b ? 1 : 0, 1e-10) << a << ", " << b;
    }
  }
}

// R Sigma R^T has the falling eigenvalues on its diagonal and zeros elsewhere.
void ExpectDiagonal(const Moments& moments, const Eigenbasis& basis) {
  const std::uint32_t n = basis.head_dim;
  const double scale = std::max(basis.values[0], 1e-300);
  Matrix half(n, std::vector<double>(n));  // R Sigma
  for (std::uint32_t a = 0; a < n; ++a) {
    for (std::uint32_t i = 0; i < n; ++i) {
      for (std::uint32_t j = 0; j < n; ++j) {
        half[a][i] += basis.vector(a)[j] * SumAt(moments, i, j);
      }
    }
  }
  for (std::uint32_t a = 0; a < n; ++a) {
    for (std::uint32_t b = 0; b < n; ++b) {
      double sum = 0;
      for (std::uint32_t i = 0; i < n; ++i) sum += half[a][i] * basis.vector(b)[i];
      const bool diagonal = a == b;
      // fp32 sums leave some eigenvalues slightly below 0, which are clamped.
      ASSERT_NEAR(sum, diagonal ? basis.values[a] : 0, (diagonal ? 1e-5 : 1e-10) * scale)
          << a << ", " << b;
    }
    EXPECT_GE(basis.values[a], 0);
    if (a > 0) {
      EXPECT_LE(basis.values[a], basis.values[a - 1]);
    }
  }
}

void ExpectLargestPositive(const Eigenbasis& basis) {
  for (std::uint32_t a = 0; a < basis.head_dim; ++a) {
    double largest = 0;
    for (std::uint32_t d = 0; d < basis.head_dim; ++d) {
      if (std::fabs(basis.vector(a)[d]) > std::fabs(largest)) largest = basis.vector(a)[d];
    }
    EXPECT_GT(largest, 0) << "vector " << a;
  }
}

TEST(Decompose, DiagonalisesAndFalls) {
  TestRandom random;
  for (const std::uint32_t head_dim : kHeadDims) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{20}, std::size_t{600}}) {
      const StoredRows rows(PowerLaw(random, count, head_dim, 0.5), ElementType::kBf16);
      const Moments moments = MomentsOf(rows);
      const Eigenbasis basis = Decompose(moments);
      ExpectOrthonormal(basis);
      ExpectDiagonal(moments, basis);
      ExpectLargestPositive(basis);
    }
  }
}

TEST(Decompose, FindsTheVectorsThatJacobiFinds) {
  TestRandom random;
  const StoredRows rows(PowerLaw(random, 500, 64, 1.0), ElementType::kFp32);
  const Eigenbasis basis = Decompose(MomentsOf(rows));
  const Matrix expected = plain::Eigenvectors(plain::SecondMoments(rows.all()));
  for (std::uint32_t a = 0; a < 8; ++a) {  // far apart, so unique
    for (std::uint32_t d = 0; d < 64; ++d) {
      ASSERT_NEAR(basis.vector(a)[d], expected[a][d], 1e-4) << "vector " << a << ", " << d;
    }
  }
}

TEST(Decompose, OfZerosIsTheIdentity) {
  const Eigenbasis basis = Decompose(Moments(64));
  for (std::uint32_t a = 0; a < 64; ++a) {
    EXPECT_EQ(basis.values[a], 0);
    for (std::uint32_t d = 0; d < 64; ++d) ASSERT_EQ(basis.vector(a)[d], a == d ? 1 : 0);
  }
}

}  // namespace
}  // namespace tessera::kernels
