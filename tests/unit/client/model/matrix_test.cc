// Matrix products compared with sums in double precision, for shapes that end inside a block or a
// panel.

#include "client/model/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/seed.h"

namespace tessera::llm {
namespace {

float Value(TestRandom& random) {
  return static_cast<float>(static_cast<double>(random.Below(2001)) / 1000 - 1);
}

TEST(Matrix, ProductsAreThoseOfDoublePrecision) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    const std::size_t rows = random.Between(1, 200), in = random.Between(1, 70);
    const std::size_t out = random.Between(1, 70);
    const std::size_t x_stride = in + random.Below(9), y_stride = out + random.Below(9);
    std::vector<float> x(rows * x_stride);
    for (float& value : x) value = Value(random);
    std::vector<std::uint16_t> by_rows(in * out), by_columns(in * out);
    for (std::size_t i = 0; i < in * out; ++i) {
      by_rows[i] = kernels::FloatToBf16(Value(random));
      by_columns[i % out * in + i / out] = by_rows[i];
    }
    const Extent extent = {rows, random.Between(1, in), random.Between(1, out)};
    constexpr float kUntouched = 1e9f;
    for (const Panels& matrix : {Panels::OfRows(by_rows.data(), out, in, out),
                                 Panels::OfColumns(by_columns.data(), in, in, out)}) {
      std::vector<float> y(rows * y_stride, kUntouched);
      Multiply(x.data(), x_stride, matrix, extent, y.data(), y_stride);
      for (std::size_t at = 0; at < y.size(); ++at) {
        const std::size_t row = at / y_stride, column = at % y_stride;
        if (column >= extent.out) {
          ASSERT_EQ(y[at], kUntouched) << "row " << row << ", column " << column;
          continue;
        }
        double sum = 0;
        for (std::size_t i = 0; i < extent.in; ++i) {
          sum += static_cast<double>(x[row * x_stride + i]) *
                 kernels::Bf16ToFloat(by_rows[i * out + column]);
        }
        // Each of `in` additions rounds a sum of at most `in`.
        const double in_double = static_cast<double>(in);
        ASSERT_NEAR(y[at], sum, in_double * in_double * 0x1p-24);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::llm
