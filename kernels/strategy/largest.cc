#include "kernels/strategy/largest.h"

#include <algorithm>
#include <bit>

namespace tessera::kernels {
namespace {

std::uint32_t CountAbove(const Magnitudes& numbers, std::int32_t bits) {
  std::int32_t above = 0;  // signed, like the vector comparison
  for (std::uint32_t i = 0; i < numbers.size; ++i) above += numbers.bits[i] > bits ? 1 : 0;
  return static_cast<std::uint32_t>(above);
}

std::int32_t LargestBits(const Magnitudes& numbers) {
  std::int32_t largest = 0;
  for (std::uint32_t i = 0; i < numbers.size; ++i) {
    largest = numbers.bits[i] > largest ? numbers.bits[i] : largest;
  }
  return largest;
}

// The search starts 2^16 below the largest number: the cutoff is usually near it.
constexpr std::int32_t kNear = 16 << 23;

}  // namespace

Cutoff FindCutoff(const Magnitudes& numbers, std::uint32_t count) {
  if (count >= numbers.size) return {.bits = -1, .equal = 0};
  std::int32_t high = LargestBits(numbers);
  if (count == 0) return {.bits = high, .equal = 0};
  // Bisection: more than `count` numbers are above `low`, fewer above `high`.
  std::int32_t low = -1;
  std::uint32_t above_high = 0;
  std::int32_t middle = std::max(high - kNear, 0);
  while (high - low > 1) {
    const std::uint32_t above = CountAbove(numbers, middle);
    if (above == count) return {.bits = middle, .equal = 0};
    if (above > count) {
      low = middle;
    } else {
      high = middle;
      above_high = above;
    }
    middle = low + (high - low) / 2;
  }
  return {.bits = high, .equal = count - above_high};
}

double SumOfLargest(const Magnitudes& numbers, std::uint32_t count) {
  const Cutoff cutoff = FindCutoff(numbers, count);
  // Several sums and no branches let the compiler vectorize.
  constexpr std::uint32_t kSums = 4;
  double sums[kSums] = {};
  const auto add = [&](std::uint32_t i, double& sum) {
    const std::int32_t all_ones_if_above =
        -static_cast<std::int32_t>(numbers.bits[i] > cutoff.bits);
    sum += std::bit_cast<float>(numbers.bits[i] & all_ones_if_above);
  };
  std::uint32_t i = 0;
  for (; i + kSums <= numbers.size; i += kSums) {
    for (std::uint32_t j = 0; j < kSums; ++j) add(i + j, sums[j]);
  }
  for (; i < numbers.size; ++i) add(i, sums[0]);
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  if (cutoff.equal != 0) sum += cutoff.equal * double{std::bit_cast<float>(cutoff.bits)};
  return sum;
}

void IndicesOfLargest(const Magnitudes& numbers, std::uint32_t count, std::uint16_t* indices) {
  const Cutoff cutoff = FindCutoff(numbers, count);
  std::uint32_t equal = cutoff.equal;
  for (std::uint32_t i = 0; i < numbers.size; ++i) {
    const bool takes_equal = equal != 0 && numbers.bits[i] == cutoff.bits;
    if (takes_equal) --equal;
    if (takes_equal || numbers.bits[i] > cutoff.bits) {
      *indices++ = static_cast<std::uint16_t>(i);
    }
  }
}

}  // namespace tessera::kernels
