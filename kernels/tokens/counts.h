// Whole numbers from shares: rounded up or down, but not for the sake of a rounding error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tessera::kernels {

inline constexpr double kCountSlack = 1e-6;

// `number` is below 2^63; what would be below 0 is 0.
inline std::uint64_t CountUp(double number) {
  return static_cast<std::uint64_t>(std::max(0.0, std::ceil(number - kCountSlack)));
}
inline std::uint64_t CountDown(double number) {
  return static_cast<std::uint64_t>(std::max(0.0, std::floor(number + kCountSlack)));
}

}  // namespace tessera::kernels
