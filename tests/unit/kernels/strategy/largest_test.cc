#include "kernels/strategy/largest.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

float Number(TestRandom& random, std::uint64_t kind) {
  switch (kind) {
    case 0:  // ties
      return static_cast<float>(random.Below(4)) * 0.25f;
    case 1:  // any magnitude, subnormal ones too
      return std::bit_cast<float>(static_cast<std::uint32_t>(random.Below(0x7f800000)));
    default:
      return static_cast<float>(random.Below(1 << 24)) * 0x1p-24f;
  }
}

TEST(Largest, AreThoseThatSortingGives) {
  TestRandom random;
  for (int round = 0; round < 3000; ++round) {
    const std::uint64_t kind = random.Below(3);
    std::vector<float> numbers(random.Between(1, 256));
    std::vector<std::int32_t> bits;
    for (float& number : numbers) {
      number = Number(random, kind);
      bits.push_back(std::bit_cast<std::int32_t>(number));
    }
    const auto size = static_cast<std::uint32_t>(numbers.size());
    const auto count = static_cast<std::uint32_t>(random.Between(0, size));
    std::vector<std::uint16_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint16_t a, std::uint16_t b) { return numbers[a] > numbers[b]; });
    order.resize(count);
    double sum = 0;
    for (const std::uint16_t index : order) sum += numbers[index];
    std::sort(order.begin(), order.end());

    const Magnitudes magnitudes = {.bits = bits.data(), .size = size};
    EXPECT_NEAR(SumOfLargest(magnitudes, count), sum, 1e-12 * sum);
    std::vector<std::uint16_t> indices(count);
    IndicesOfLargest(magnitudes, count, indices.data());
    ASSERT_EQ(indices, order) << count << " of " << size << ", kind " << kind;
  }
}

}  // namespace
}  // namespace tessera::kernels
