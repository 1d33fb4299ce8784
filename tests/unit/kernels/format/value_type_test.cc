#include "kernels/format/value_type.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

constexpr ValueType kScaledTypes[] = {ValueType::kInt8, ValueType::kFp8};
constexpr std::uint8_t kLargestFp8 = 0x7e;

// e4m3 by definition; NaN if all bits except the sign are set.
double Fp8ByDefinition(unsigned code) {
  const unsigned exponent = code >> 3 & 15;
  const unsigned mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9
                    : (1 + mantissa / 8.0) * std::ldexp(1.0, static_cast<int>(exponent) - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(Fp8, EveryCodeMeansWhatTheDefinitionSays) {
  for (unsigned code = 0; code < 256; ++code) {
    const float value = Fp8ToFloat(static_cast<std::uint8_t>(code));
    const double expected = Fp8ByDefinition(code);
    ASSERT_EQ(std::signbit(value), (code & 0x80) != 0) << code;
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << code;
    } else {
      ASSERT_EQ(value, expected) << code;
    }
    ASSERT_EQ(FloatToFp8(value), code) << "round trip";
  }
}

TEST(Fp8, RoundsToNearestTiesToEven) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (std::uint8_t low = 0; low < kLargestFp8; ++low) {
    const auto high = static_cast<std::uint8_t>(low + 1);
    const auto middle = static_cast<float>((Fp8ByDefinition(low) + Fp8ByDefinition(high)) / 2);
    for (std::uint8_t sign : {0x00, 0x80}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      const std::uint8_t even = low % 2 == 0 ? low : high;
      ASSERT_EQ(FloatToFp8(s * middle), even | sign) << "between " << +low << " and " << +high;
      ASSERT_EQ(FloatToFp8(s * std::nextafter(middle, 0.0f)), low | sign);
      ASSERT_EQ(FloatToFp8(s * std::nextafter(middle, kInfinity)), high | sign);
    }
  }
}

TEST(Fp8, RandomFloatsGoToTheNearestCode) {
  TestRandom random;
  for (int i = 0; i < 20000; ++i) {
    const float value = std::ldexp(1 + static_cast<float>(random.Below(1u << 23)) * 0x1p-23f,
                                   static_cast<int>(random.Between(0, 22)) - 13);
    const double error = std::fabs(Fp8ToFloat(FloatToFp8(value)) - double{value});
    for (unsigned code = 0; code <= kLargestFp8; ++code) {
      ASSERT_LE(error, std::fabs(Fp8ByDefinition(code) - value)) << value << " against " << code;
    }
  }
}

TEST(Fp8, Saturates) {
  for (float value : {448.0f, 463.9f, 464.0f, 480.0f, 1e30f, std::numeric_limits<float>::max(),
                      std::numeric_limits<float>::infinity()}) {
    ASSERT_EQ(FloatToFp8(value), kLargestFp8) << value;
    ASSERT_EQ(FloatToFp8(-value), kLargestFp8 | 0x80) << value;
  }
  ASSERT_EQ(FloatToFp8(-0.0f), 0x80);
  ASSERT_TRUE(std::isnan(Fp8ToFloat(FloatToFp8(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Int8, RoundsToNearestTiesToEven) {
  for (float scale : {1.0f, 0x1p-20f, 0x1p40f}) {
    for (int n = -130; n <= 130; ++n) {
      const int nearest = std::clamp(n, -127, 127);
      const int tie = std::clamp(n % 2 == 0 ? n : n + 1, -127, 127);
      const auto stored = [&](double quotient) {
        const auto value = static_cast<float>(quotient * scale);
        return FromScaled(ValueType::kInt8, ToScaled(ValueType::kInt8, value, scale));
      };
      ASSERT_EQ(stored(n), nearest);
      ASSERT_EQ(stored(n + 0.5), tie) << n;
      ASSERT_EQ(stored(n + 0.499), nearest);
      ASSERT_EQ(stored(n + 0.501), std::clamp(n + 1, -127, 127));
    }
  }
}

// A number of any magnitude that rows may have, often near the smallest that has a scale.
float RandomPeak(TestRandom& random) {
  const float mantissa = 1 + static_cast<float>(random.Below(1u << 23)) * 0x1p-23f;
  if (random.OneIn(4)) {
    const auto steps = static_cast<int>(random.Between(0, 40)) - 20;
    return kSmallestScaledPeak *
           (1 + static_cast<float>(steps) * (random.OneIn(2) ? 0x1p-23f : 0x1p-7f));
  }
  return std::ldexp(mantissa, static_cast<int>(random.Between(0, 170)) - 103);
}

TEST(Scale, ThePeakIsStoredAsTheLargest) {
  TestRandom random;
  for (ValueType type : kScaledTypes) {
    for (int i = 0; i < 50000; ++i) {
      const float peak = RandomPeak(random);
      const std::uint16_t scale = ScaleOf(type, peak);
      if (peak < kSmallestScaledPeak) {
        ASSERT_EQ(scale, 0) << peak;
        ASSERT_EQ(ToScaled(type, peak, 0.0f), 0);
        continue;
      }
      const float s = Bf16ToFloat(scale);
      ASSERT_TRUE(std::isnormal(s)) << peak;
      ASSERT_EQ(FromScaled(type, ToScaled(type, peak, s)), LargestStored(type)) << peak;
      ASSERT_EQ(FromScaled(type, ToScaled(type, -peak, s)), -LargestStored(type)) << peak;
      ASSERT_NEAR(double{s} * LargestStored(type) / peak, 1.0, 0x1p-8) << peak;
    }
  }
}

struct ScaledRow {
  std::uint16_t scale;
  std::vector<std::uint8_t> stored;
  bool operator==(const ScaledRow&) const = default;
};

ScaledRow Quantise(ValueType type, const std::vector<float>& row) {
  float peak = 0;
  for (float value : row) peak = std::max(peak, std::fabs(value));
  ScaledRow scaled = {.scale = ScaleOf(type, peak), .stored = {}};
  for (float value : row) {
    scaled.stored.push_back(ToScaled(type, value, Bf16ToFloat(scaled.scale)));
  }
  return scaled;
}

TEST(Scale, QuantisingWhatWasDequantisedChangesNothing) {
  TestRandom random;
  for (ValueType type : kScaledTypes) {
    for (int i = 0; i < 20000; ++i) {
      std::vector<float> row(1 + random.Below(40));
      const float peak = RandomPeak(random);
      for (float& value : row) {
        value = peak * (static_cast<float>(random.Below(2001)) * 1e-3f - 1);
      }
      row[random.Below(row.size())] = random.OneIn(2) ? peak : -peak;
      const ScaledRow once = Quantise(type, row);
      for (std::size_t j = 0; j < row.size(); ++j) {
        row[j] = Bf16ToFloat(once.scale) * FromScaled(type, once.stored[j]);
      }
      ASSERT_EQ(Quantise(type, row), once) << ValueTypeName(type) << " peak " << peak;
    }
  }
}

// The error of an element is half a unit of its stored value: 1/254 of the peak in int8, 1/16 of
// itself in fp8, but at least 2^-6 of a unit.
TEST(Scale, ElementsAreWithinHalfAUnit) {
  TestRandom random;
  for (int i = 0; i < 50000; ++i) {
    const float peak = RandomPeak(random);
    if (peak < kSmallestScaledPeak) continue;
    const float value = peak * (static_cast<float>(random.Below(200001)) * 1e-5f - 1);
    const double int8_scale = Bf16ToFloat(ScaleOf(ValueType::kInt8, peak));
    const double int8 =
        int8_scale * FromScaled(ValueType::kInt8,
                                ToScaled(ValueType::kInt8, value, static_cast<float>(int8_scale)));
    ASSERT_LE(std::fabs(int8 - value), int8_scale * 0.5001) << value << " of " << peak;
    const double fp8_scale = Bf16ToFloat(ScaleOf(ValueType::kFp8, peak));
    const double fp8 =
        fp8_scale * FromScaled(ValueType::kFp8,
                               ToScaled(ValueType::kFp8, value, static_cast<float>(fp8_scale)));
    ASSERT_LE(std::fabs(fp8 - value), std::max(std::fabs(value) * 0.0626, fp8_scale * 0x1.001p-10))
        << value << " of " << peak;
  }
}

TEST(ValueTypes, BytesAndNames) {
  ASSERT_FALSE(IsValueType(0));
  ASSERT_FALSE(IsValueType(5));
  constexpr std::size_t kBytes[] = {2, 2, 1, 1};
  constexpr std::size_t kScale[] = {0, 0, 2, 2};
  constexpr const char* kNames[] = {"bf16", "fp16", "int8", "fp8"};
  for (std::uint8_t v = 1; v <= 4; ++v) {
    const auto type = static_cast<ValueType>(v);
    ASSERT_TRUE(IsValueType(v));
    ASSERT_EQ(ValueBytes(type), kBytes[v - 1]);
    ASSERT_EQ(ScaleBytes(type), kScale[v - 1]);
    ASSERT_EQ(IsScaled(type), kScale[v - 1] != 0);
    ASSERT_STREQ(ValueTypeName(type), kNames[v - 1]);
  }
}

}  // namespace
}  // namespace tessera::kernels
