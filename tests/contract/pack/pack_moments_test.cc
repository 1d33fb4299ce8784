// moments: sums of products of rows.
#include <cmath>
#include <vector>

#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

TEST_P(PackConformance, MomentsAddTheProductsOfRows) {
  TESSERA_NEEDS(moments);
  for (int round = 0; round < Rounds(24); ++round) {
    const auto dim = static_cast<std::uint32_t>(random_.Pick(kHeadDims));
    const ElementType type = kTypes[random_.Below(3)];
    const auto count = static_cast<std::uint32_t>(random_.OneIn(2) ? random_.Between(1, 5)
                                                                   : random_.Between(6, 70));
    const TileInput input(DenseShape(dim, type), type, count, Content::kNormal, random_);
    const EncodeJob rows = input.Job(DenseShape(dim, type));
    std::vector<double> sums(std::size_t{dim} * dim);
    for (double& sum : sums) sum = NormalNumber(random_);
    std::vector<double> exact = sums;
    std::vector<double> mass(sums.size(), 0.0);
    for (std::uint32_t r = 0; r < count; ++r) {
      const std::vector<double> x = input.Row(false, r);
      for (std::uint32_t i = 0; i < dim; ++i) {
        for (std::uint32_t j = i; j < dim; ++j) {
          exact[i * dim + j] += x[i] * x[j];
          mass[i * dim + j] += std::fabs(x[i] * x[j]);
        }
      }
    }
    ExpectRan(ops().moments({.rows = rows.key,
                             .stride = rows.stride,
                             .type = type,
                             .row_count = count,
                             .head_dim = dim,
                             .sums = sums.data()}));
    for (std::uint32_t i = 0; i < dim; ++i) {
      for (std::uint32_t j = 0; j < dim; ++j) {
        const std::size_t at = std::size_t{i} * dim + j;
        ASSERT_LE(std::fabs(sums[at] - exact[at]),
                  j < i ? 0 : mass[at] * 0x1p-20 + std::fabs(exact[at]) * 0x1p-50)
            << i << ", " << j << " of " << dim << " rows " << count;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
