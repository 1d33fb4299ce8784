#include "kernels/dispatch/numerics.h"

#include <bit>
#include <cstdint>
#include <limits>

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::uint64_t kMantissaMask = (std::uint64_t{1} << 52) - 1;

double PowerOfTwo(std::int64_t exponent) {  // -1022 .. 1023
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

}  // namespace

double Exp2(double x) {
  if (x < -1022) return 0;
  if (x >= 1024) return kInfinity;
  if (x != x) return x;
  const auto whole = static_cast<std::int64_t>(x < 0 ? x - 0.5 : x + 0.5);
  const double y = (x - static_cast<double>(whole)) * kLn2;  // |y| <= 0.3466
  double sum = 1;
  for (int n = 14; n >= 1; --n) sum = 1 + sum * y / n;  // e^y; y^15 / 15! < 1e-19
  if (whole == 1024) return sum * PowerOfTwo(1023) * 2;
  if (whole < -1022) return sum * PowerOfTwo(-1022) * 0.5;
  return sum * PowerOfTwo(whole);
}

double Ln(double x) {
  if (x != x) return x;
  if (x == 0) return -kInfinity;
  int scale = 0;
  if (x < std::numeric_limits<double>::min()) {  // subnormal
    x *= 0x1p64;
    scale = -64;
  }
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  std::int64_t exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  double mantissa = std::bit_cast<double>((bits & kMantissaMask) | std::uint64_t{1023} << 52);
  if (mantissa > 1.41421356237309515) {
    mantissa *= 0.5;
    ++exponent;
  }
  // ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double sum = 0;
  for (int n = 23; n >= 1; n -= 2) sum = sum * square + 1.0 / n;
  return static_cast<double>(exponent + scale) * kLn2 + 2 * s * sum;
}

}  // namespace tessera::kernels
