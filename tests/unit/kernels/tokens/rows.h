// Random rows as bytes and as numbers.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "kernels/dispatch/implementation.h"
#include "kernels/reference/attend_part.h"
#include "kernels/tokens/attention.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {

struct TestRows {
  std::vector<float> numbers;
  std::uint32_t head_dim = 64;

  TestRows(std::uint64_t count, TestRandom& random) {
    std::mt19937_64 engine(random.Bits());
    std::normal_distribution<float> normal;
    numbers.resize(count * head_dim);
    for (float& number : numbers) number = normal(engine);
  }
  float* row(std::uint64_t i) { return numbers.data() + i * head_dim; }
  const float* row(std::uint64_t i) const { return numbers.data() + i * head_dim; }
  std::uint64_t count() const { return numbers.size() / head_dim; }
  RowRange range() const {
    return {.rows = reinterpret_cast<const std::byte*>(numbers.data()), .count = count()};
  }
  double Dot(std::uint64_t i, const TestRows& other, std::uint64_t j) const {
    double sum = 0;
    for (std::uint32_t c = 0; c < head_dim; ++c) sum += double{row(i)[c]} * other.row(j)[c];
    return sum;
  }
};

inline LayerGeometry TestGeometry(float softcap = 0) {
  return {.query_heads = 1,
          .kv_heads = 1,
          .head_dim = 64,
          .type = ElementType::kFp32,
          .scale = 0.125f,
          .logit_softcap = softcap};
}

}  // namespace tessera::kernels
