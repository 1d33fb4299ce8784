#include "kernels/strategy/book.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

// Rows around a large mean whose energy falls from direction to direction.
Matrix RowsAroundAMean(std::uint32_t count, std::uint32_t dim, TestRandom& random) {
  const auto number = [&] { return static_cast<double>(random.Below(2001)) / 1000 - 1; };
  Matrix directions(8, std::vector<double>(dim));
  std::vector<double> mean(dim);
  for (auto& direction : directions) {
    for (double& element : direction) element = number();
  }
  for (double& element : mean) element = 50 * number();
  Matrix rows(count, mean);
  for (auto& row : rows) {
    for (std::size_t k = 0; k < directions.size(); ++k) {
      const double strength = 4 * number() / static_cast<double>(k + 1);
      for (std::uint32_t d = 0; d < dim; ++d) row[d] += strength * directions[k][d];
    }
    for (double& element : row) element += 0.1 * number();
  }
  return rows;
}

float ElementOf(const std::byte* bf16, std::size_t index) {
  std::uint16_t bits;
  std::memcpy(&bits, bf16 + 2 * index, sizeof(bits));
  return Bf16ToFloat(bits);
}

class BookTest : public testing::Test {
 protected:
  TestRandom random_;
};

TEST_F(BookTest, CentresAndOrdersByEnergy) {
  for (const std::uint32_t dim : {64u, 128u, 256u}) {
    const Matrix rows = RowsAroundAMean(600, dim, random_);
    const TestLane lane(rows, rows, ElementType::kBf16);
    const BookPlanes planes = {.key = 2, .value = 1};
    ASSERT_EQ(BookProblem(lane.rows(), planes, BestOperations()), "");
    const Book book = MakeBook(lane.rows(), planes, BestOperations());
    const RotationView view = book.view();
    // R is orthogonal up to the rounding to bf16.
    for (const std::byte* matrix : {view.key, view.value}) {
      for (std::uint32_t a = 0; a < dim; a += 7) {
        for (std::uint32_t b = a; b < dim; b += 5) {
          double dot = 0;
          for (std::uint32_t d = 0; d < dim; ++d) {
            dot += double{ElementOf(matrix, a * dim + d)} * ElementOf(matrix, b * dim + d);
          }
          ASSERT_NEAR(dot, a == b ? 1 : 0, 0x1p-6) << a << ", " << b;
        }
      }
    }
    // The first plane of keys holds nearly all of the centred energy, spread over its channels.
    double first = 0;
    double all = 0;
    for (const std::vector<double>& row : rows) {
      for (std::uint32_t c = 0; c < dim; ++c) {
        double z = 0;
        for (std::uint32_t d = 0; d < dim; ++d) {
          z += ElementOf(view.key, c * dim + d) * (row[d] - ElementOf(view.key_mean, d));
        }
        all += z * z;
        if (c < dim / 2) first += z * z;
      }
    }
    ASSERT_GT(first / all, 0.99);
    ASSERT_NEAR(
        all / 600,
        [&] {
          double sum = 0;
          for (float value : book.key.eigenvalues) sum += value;
          return sum;
        }(),
        all / 600 * 0.05);
  }
}

TEST_F(BookTest, MeasuresErrorsThatFallWithTheWidth) {
  const Matrix rows = RowsAroundAMean(400, 128, random_);
  const TestLane lane(rows, rows, ElementType::kFp32);
  const Book book = MakeBook(lane.rows(), {.key = 2, .value = 2}, BestOperations());
  for (const BookSide& side : {book.key, book.value}) {
    for (const auto& errors : side.errors) {
      for (std::size_t w = 1; w < errors.size(); ++w) ASSERT_LT(errors[w], errors[w - 1] / 4);
    }
    ASSERT_EQ(side.Error({6, 4}), side.errors[0][2] + side.errors[1][1]);
  }
  ASSERT_TRUE(book.Fits(PlanesShape(128, {4, 2}, {4, 2})));
  ASSERT_FALSE(book.Fits(PlanesShape(128, {4, 2}, {4, 0})));
  ASSERT_FALSE(book.Fits(PlanesShape(64, {4, 2}, {4, 2})));
}

TEST_F(BookTest, DependsOnTheRowsOnly) {
  const Matrix rows = RowsAroundAMean(200, 64, random_);
  const TestLane a(rows, rows, ElementType::kFp16);
  const TestLane b(rows, rows, ElementType::kFp16);
  ASSERT_EQ(MakeBook(a.rows(), {}, BestOperations()).bytes,
            MakeBook(b.rows(), {}, BestOperations()).bytes);
}

TEST_F(BookTest, NamesWhatIsWrong) {
  Matrix rows(3, std::vector<double>(64, 1.0));
  const TestLane good(rows, rows, ElementType::kFp32);
  const auto problem = [](const LaneRows& lane, const BookPlanes& planes) {
    return BookProblem(lane, planes, BestOperations());
  };
  EXPECT_NE(problem(good.rows(), {.key = 3}).find("not 3"), std::string::npos);
  LaneRows uneven = good.rows();
  uneven.keys.count = 2;
  EXPECT_NE(problem(uneven, {}).find("2 and 3"), std::string::npos);
  rows[2][5] = std::numeric_limits<double>::infinity();
  const TestLane bad(rows, rows, ElementType::kFp32);
  EXPECT_EQ(problem(bad.rows(), {}), "channel 5 of key 2 is not finite, or at least 2^63");
  EXPECT_NE(PlanesProblem(PlanesShape(128, {6, 5}, {4, 0})).find("6|5"), std::string::npos);
  EXPECT_EQ(PlanesProblem(PlanesShape(128, {6, 4}, {4, 0})), "");
}

}  // namespace
}  // namespace tessera::kernels
