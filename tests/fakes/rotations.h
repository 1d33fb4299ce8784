// Random orthonormal rotations, rounded as a policy would store them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/seed.h"

namespace tessera::fakes {

// `count` matrices of [channels][head_dim], rounded to `type`: bf16 or fp32.
inline std::vector<std::byte> RandomRotations(TestRandom& random, std::size_t count,
                                              std::uint32_t channels, std::uint32_t head_dim,
                                              kernels::ElementType type) {
  std::mt19937_64 engine(random.Bits());
  std::normal_distribution<double> normal;
  const std::size_t bytes = kernels::ElementBytes(type);
  std::vector<std::byte> all(count * channels * head_dim * bytes);
  for (std::size_t m = 0; m < count; ++m) {
    std::vector<std::vector<double>> rows(channels, std::vector<double>(head_dim));
    for (std::uint32_t r = 0; r < channels; ++r) {
      for (double& x : rows[r]) x = normal(engine);
      for (int round = 0; round < 2; ++round) {  // twice, to reduce rounding errors
        for (std::uint32_t s = 0; s < r; ++s) {
          double dot = 0;
          for (std::uint32_t d = 0; d < head_dim; ++d) dot += rows[r][d] * rows[s][d];
          for (std::uint32_t d = 0; d < head_dim; ++d) rows[r][d] -= dot * rows[s][d];
        }
        double norm = 0;
        for (const double x : rows[r]) norm += x * x;
        for (double& x : rows[r]) x /= std::sqrt(norm);
      }
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        const auto x = static_cast<float>(rows[r][d]);
        std::byte* const at = all.data() + ((m * channels + r) * head_dim + d) * bytes;
        const std::uint16_t half = kernels::FloatToBf16(x);
        if (type == kernels::ElementType::kFp32) {
          std::memcpy(at, &x, sizeof x);
        } else {
          std::memcpy(at, &half, sizeof half);
        }
      }
    }
  }
  return all;
}

}  // namespace tessera::fakes
