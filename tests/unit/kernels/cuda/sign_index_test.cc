// The operands that sign_index.h makes of sign bits and codes, against sums over single bits.
#include "kernels/cuda/common/sign_index.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/common/fragment.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint32_t kChannels = 32;  // of a word

std::uint32_t ByteAt(std::uint32_t word, std::uint32_t i) { return word >> (8 * i) & 0xff; }

// The part of a lane's products of one word that its own channels make up: byte j of register 2 r
// and 2 r + 1 of A meets byte j of register r of B.
std::int32_t SignProduct(const SignOperand& rows, std::uint32_t row,
                         const std::uint32_t (&query)[2]) {
  std::int32_t sum = 0;
  for (std::uint32_t r = 0; r < 2; ++r) {
    for (std::uint32_t j = 0; j < 4; ++j) {
      sum += static_cast<std::int32_t>(ByteAt(rows.a[2 * r + row], j)) *
             static_cast<std::int8_t>(ByteAt(query[r], j));
    }
  }
  return sum;
}

TEST(SignIndex, ProductsAreTheSumsOfSignedCodes) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::int8_t codes[kChannels];
    for (std::int8_t& code : codes) code = static_cast<std::int8_t>(random() % 255 - 127);
    std::uint32_t packed[8];
    std::memcpy(packed, codes, sizeof packed);
    const std::uint32_t words[2] = {static_cast<std::uint32_t>(random()),
                                    static_cast<std::uint32_t>(random())};
    for (std::uint32_t row = 0; row < 2; ++row) {
      std::int32_t expected = 0;
      std::int32_t start = 0;
      for (std::uint32_t c = 0; c < kChannels; ++c) {
        expected += (words[row] >> c & 1) != 0 ? codes[c] : -codes[c];
        start -= codes[c];
      }
      // Four lanes of a quad share a row of A, and of a column of B.
      std::int32_t sum = kSignZero + start;
      for (std::uint32_t lane = 8; lane < 12; ++lane) {
        const int turn = static_cast<int>(SignTurn(lane));
        const SignOperand rows =
            SignOperandOf(std::rotl(words[0], turn), std::rotl(words[1], turn));
        const std::uint32_t query[2] = {SignQuery(packed, lane, 0), SignQuery(packed, lane, 1)};
        sum += SignProduct(rows, row, query);
      }
      EXPECT_EQ(std::bit_cast<float>(sum) - kSignZeroValue, static_cast<float>(expected));
    }
  }
}

// Each quad's four rows are in the accumulators of its own lanes.
TEST(SignIndex, AccumulatorsHoldTheRowsOfTheLanesQuad) {
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    EXPECT_EQ(AccumulatorRow(lane, 0), lane / 4);
    EXPECT_EQ(AccumulatorRow(lane, 2), lane / 4 + 8);
  }
}

TEST(SignIndex, NormsAreRoundedToEighthsOfAPowerOfTwo) {
  EXPECT_EQ(NormByte(0), 0u);
  EXPECT_EQ(NormByte(0x1p-40f), 1u);
  EXPECT_EQ(NormByte(0x1p30f), 255u);
  for (std::uint32_t k = 1; k < 256; ++k) {
    for (const double off : {-0.45, 0.0, 0.45}) {
      EXPECT_EQ(NormByte(static_cast<float>(std::exp2((k + off) / 8 - 16))), k) << off;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
