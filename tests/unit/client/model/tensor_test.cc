// Quantised blocks, packed here bit by bit as the format describes them, and read back.

#include "client/model/checkpoint/tensor.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "client/model/matrix.h"
#include "kernels/format/element.h"
#include "tests/fakes/seed.h"

namespace tessera::llm {
namespace {

std::string Half(float value) {
  const std::uint16_t bits = kernels::FloatToFp16(value);
  return {reinterpret_cast<const char*>(&bits), 2};
}
char Char(std::uint32_t value) { return static_cast<char>(value); }

// A block as bytes, and the numbers that it stands for.
struct Packed {
  TensorType type;
  std::string bytes;
  std::vector<double> values;
};

// Numbers with few bits, so that halves hold them.
float Scale(TestRandom& random) { return static_cast<float>(random.Between(1, 200)) / 64; }

Packed Pack32(TestRandom& random, TensorType type) {
  const bool is_5 = type == TensorType::kQ5_0 || type == TensorType::kQ5_1;
  const bool is_1 = type == TensorType::kQ4_1 || type == TensorType::kQ5_1;
  const float scale = Scale(random), offset = -Scale(random);
  Packed packed = {.type = type, .bytes = Half(scale)};
  if (type == TensorType::kQ8_0) {
    for (int i = 0; i < 32; ++i) {
      const int code = static_cast<int>(random.Below(256)) - 128;
      packed.bytes += static_cast<char>(code);
      packed.values.push_back(code * double{scale});
    }
    return packed;
  }
  std::vector<std::uint32_t> codes;
  for (int i = 0; i < 32; ++i) codes.push_back(random.Below(is_5 ? 32 : 16));
  if (is_1) packed.bytes += Half(offset);
  if (is_5) {
    std::uint32_t fifth = 0;
    for (int i = 0; i < 32; ++i) fifth |= codes[i] / 16 << i;
    packed.bytes.append(reinterpret_cast<const char*>(&fifth), 4);
  }
  for (int i = 0; i < 16; ++i) packed.bytes += Char(codes[i] % 16 + codes[i + 16] % 16 * 16);
  for (const std::uint32_t code : codes) {
    packed.values.push_back(is_1 ? code * double{scale} + double{offset}
                                 : (double{1} * code - (is_5 ? 16 : 8)) * scale);
  }
  return packed;
}

Packed Pack4K(TestRandom& random, TensorType type) {
  const bool is_5 = type == TensorType::kQ5K;
  const float scale = Scale(random), offset = Scale(random);
  Packed packed = {.type = type, .bytes = Half(scale) + Half(offset)};
  std::vector<std::uint32_t> scales, offsets, codes;
  for (int i = 0; i < 8; ++i) scales.push_back(random.Below(64));
  for (int i = 0; i < 8; ++i) offsets.push_back(random.Below(64));
  for (int i = 0; i < 256; ++i) codes.push_back(random.Below(is_5 ? 32 : 16));
  // Groups 4 to 7 keep their high two bits above the low groups' six bits.
  for (int i = 0; i < 4; ++i) packed.bytes += Char(scales[i] + scales[i + 4] / 16 * 64);
  for (int i = 0; i < 4; ++i) packed.bytes += Char(offsets[i] + offsets[i + 4] / 16 * 64);
  for (int i = 4; i < 8; ++i) packed.bytes += Char(scales[i] % 16 + offsets[i] % 16 * 16);
  for (int i = 0; is_5 && i < 32; ++i) {
    std::uint32_t fifths = 0;
    for (int g = 0; g < 8; ++g) fifths += codes[g * 32 + i] / 16 << g;
    packed.bytes += Char(fifths);
  }
  for (int pair = 0; pair < 4; ++pair) {
    for (int i = 0; i < 32; ++i) {
      packed.bytes += Char(codes[pair * 64 + i] % 16 + codes[pair * 64 + 32 + i] % 16 * 16);
    }
  }
  for (int i = 0; i < 256; ++i) {
    packed.values.push_back(double{scale} * scales[i / 32] * codes[i] -
                            double{offset} * offsets[i / 32]);
  }
  return packed;
}

Packed Pack6K(TestRandom& random) {
  std::vector<std::uint32_t> codes;
  std::vector<int> scales;
  for (int i = 0; i < 256; ++i) codes.push_back(random.Below(64));
  for (int i = 0; i < 16; ++i) scales.push_back(static_cast<int>(random.Below(256)) - 128);
  const float scale = Scale(random);
  Packed packed = {.type = TensorType::kQ6K};
  for (int half = 0; half < 256; half += 128) {
    for (int i = 0; i < 64; ++i) {
      packed.bytes += Char(codes[half + i] % 16 + codes[half + 64 + i] % 16 * 16);
    }
  }
  for (int half = 0; half < 256; half += 128) {
    for (int i = 0; i < 32; ++i) {
      std::uint32_t pairs = 0;
      for (int quarter = 0; quarter < 4; ++quarter) {
        pairs += codes[half + quarter * 32 + i] / 16 << 2 * quarter;
      }
      packed.bytes += Char(pairs);
    }
  }
  for (const int value : scales) packed.bytes += static_cast<char>(value);
  packed.bytes += Half(scale);
  for (int i = 0; i < 256; ++i) {
    packed.values.push_back(double{scale} * scales[i / 16] * (static_cast<int>(codes[i]) - 32));
  }
  return packed;
}

Packed Pack(TestRandom& random, TensorType type) {
  if (type == TensorType::kQ6K) return Pack6K(random);
  if (type == TensorType::kQ4K || type == TensorType::kQ5K) return Pack4K(random, type);
  return Pack32(random, type);
}

constexpr TensorType kQuantised[] = {TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0,
                                     TensorType::kQ5_1, TensorType::kQ8_0, TensorType::kQ4K,
                                     TensorType::kQ5K,  TensorType::kQ6K};

// A matrix of random blocks, with its numbers in row-major order.
struct RandomMatrix {
  std::string bytes;
  std::vector<double> values;
  Tensor tensor;

  RandomMatrix(TestRandom& random, TensorType type, std::uint64_t rows, std::uint64_t columns) {
    for (std::uint64_t i = 0; i < rows * columns / BlockElements(type); ++i) {
      const Packed packed = Pack(random, type);
      bytes += packed.bytes;
      values.insert(values.end(), packed.values.begin(), packed.values.end());
    }
    tensor = {.type = type, .shape = {rows, columns}, .bytes = std::as_bytes(std::span(bytes))};
  }
};

TEST(TensorBlocks, EveryQuantisedTypeIsReadAsTheFormatDescribesIt) {
  TestRandom random;
  for (const TensorType type : kQuantised) {
    const RandomMatrix matrix(random, type, 3, 512);
    ASSERT_TRUE(CheckTensor(matrix.tensor).ok()) << CheckTensor(matrix.tensor);
    std::vector<float> row(512);
    for (std::uint64_t r = 0; r < 3; ++r) {
      matrix.tensor.ReadRow(r, row);
      for (std::size_t i = 0; i < row.size(); ++i) {
        const double value = matrix.values[r * 512 + i];
        ASSERT_NEAR(row[i], value, 1e-3) << NameOf(type) << " " << i;  // of up to 10^4
      }
    }
  }
}

TEST(TensorBlocks, PanelsMultiplyByTheNumbersThatTheFileHolds) {
  TestRandom random;
  for (const TensorType type : kQuantised) {
    const std::size_t in = 512, out = random.Between(1, 40), rows = random.Between(1, 40);
    const RandomMatrix matrix(random, type, out, in);
    // Columns in reverse order.
    const Panels panels =
        Panels::OfTensor(matrix.tensor, [&](std::uint64_t column) { return out - 1 - column; });
    std::vector<float> x(rows * in), y(rows * out);
    for (float& value : x) value = static_cast<float>(random.Below(2001)) / 1000 - 1;
    Multiply(x.data(), in, panels, {rows, in, out}, y.data(), out);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t column = 0; column < out; ++column) {
        double sum = 0, size = 0;
        for (std::size_t i = 0; i < in; ++i) {
          const double term = double{x[row * in + i]} * matrix.values[(out - 1 - column) * in + i];
          sum += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(y[row * out + column], sum, size * 0x1p-20) << NameOf(type);
      }
    }
  }
}

TEST(TensorBlocks, ShapesThatContradictTheBytesAreRefused) {
  const std::string bytes(36, '\0');
  const auto status = [&](TensorType type, std::vector<std::uint64_t> shape) {
    return CheckTensor(
        {.type = type, .shape = std::move(shape), .bytes = std::as_bytes(std::span(bytes))});
  };
  EXPECT_TRUE(status(TensorType::kF32, {9}).ok());
  EXPECT_TRUE(status(TensorType::kQ4_0, {2, 32}).ok());
  EXPECT_FALSE(status(TensorType::kQ4_0, {4, 16}).ok());
  EXPECT_FALSE(status(TensorType::kQ4_0, {3, 32}).ok());
  EXPECT_FALSE(status(TensorType::kQ4_0, {1, 32}).ok());
  const std::uint64_t half = std::uint64_t{1} << 32;  // its square overflows to 0
  EXPECT_FALSE(status(TensorType::kF32, {half, half}).ok());
  EXPECT_FALSE(status(TensorType::kF32, {0}).ok());
}

}  // namespace
}  // namespace tessera::llm
