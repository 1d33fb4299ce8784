// Rounds shares of a count up or down to integers, with slack for rounding errors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::kernels {

inline constexpr double kCountSlack = 1e-6;

// `number` is below 2^63; negative results become 0.
inline std::uint64_t CountUp(double number) {
  return static_cast<std::uint64_t>(std::max(0.0, std::ceil(number - kCountSlack)));
}
inline std::uint64_t CountDown(double number) {
  return static_cast<std::uint64_t>(std::max(0.0, std::floor(number + kCountSlack)));
}

// The largest n such that share * n, rounded up, is at most `count`.
inline std::uint64_t MostForShare(std::uint64_t count, double share) {
  constexpr double kLargest = 0x1p52;  // above it not every integer is a double
  const double about = (static_cast<double>(count) + kCountSlack) / share;
  if (!(about < kLargest)) return std::numeric_limits<std::uint64_t>::max();
  auto most = static_cast<std::uint64_t>(about);
  const auto share_of = [&](std::uint64_t all) {
    return CountUp(share * static_cast<double>(all));
  };
  while (most > 0 && share_of(most) > count) --most;
  while (share_of(most + 1) <= count) ++most;
  return most;
}

}  // namespace tessera::kernels
