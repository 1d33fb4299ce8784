#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {
namespace {

class FirstUnusableTest : public testing::TestWithParam<const Implementation*> {
 protected:
  void SetUp() override {
    if (!ImplementationSupported(*GetParam())) GTEST_SKIP() << ImplementationReason(*GetParam());
  }
  TestRandom random_;
};

bool Usable(float value) { return std::fabs(value) < 0x1p63f; }  // false for NaN

void Put(ElementType type, std::byte* elements, std::size_t i, std::uint32_t bits) {
  if (type == ElementType::kFp32) {
    std::memcpy(elements + 4 * i, &bits, 4);
  } else {
    const auto half = static_cast<std::uint16_t>(bits);
    std::memcpy(elements + 2 * i, &half, 2);
  }
}

float Value(ElementType type, std::uint32_t bits) {
  switch (type) {
    case ElementType::kBf16:
      return Bf16ToFloat(static_cast<std::uint16_t>(bits));
    case ElementType::kFp16:
      return Fp16ToFloat(static_cast<std::uint16_t>(bits));
    case ElementType::kFp32:
      return std::bit_cast<float>(bits);
  }
  return 0;
}

// Every 16-bit pattern, and fp32 patterns around the limit, each alone among zeros.
TEST_P(FirstUnusableTest, EveryPattern) {
  constexpr std::size_t kCount = 131;  // whole vectors and a remainder
  for (ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    std::vector<std::uint32_t> patterns;
    if (type == ElementType::kFp32) {
      for (std::uint32_t border : {0x5f000000u, 0x7f800000u, 0x7fffffffu, 0u}) {
        for (std::uint32_t d = 0; d < 64; ++d) {
          patterns.push_back(border + d - 32);
          patterns.push_back((border + d - 32) ^ 0x80000000u);
        }
      }
      for (int i = 0; i < 4000; ++i) patterns.push_back(static_cast<std::uint32_t>(random_.Bits()));
    } else {
      for (std::uint32_t bits = 0; bits < 0x10000; ++bits) patterns.push_back(bits);
    }
    std::vector<std::byte> elements(kCount * ElementBytes(type));
    for (std::uint32_t bits : patterns) {
      const std::size_t at = random_.Below(kCount);
      Put(type, elements.data(), at, bits);
      const std::int64_t expected = Usable(Value(type, bits)) ? -1 : static_cast<std::int64_t>(at);
      ASSERT_EQ(FirstUnusable(*GetParam(), elements.data(), kCount, type), expected)
          << ElementName(type) << " 0x" << std::hex << bits;
      Put(type, elements.data(), at, 0);
    }
  }
}

// Any length and alignment, with several unusable values: returns the first and reads nothing after
// the end.
TEST_P(FirstUnusableTest, FindsTheFirst) {
  for (int round = 0; round < 3000; ++round) {
    const auto type = static_cast<ElementType>(random_.Between(1, 3));
    const std::size_t count = random_.Below(300);
    const std::size_t shift = random_.Below(8);
    std::vector<std::byte> buffer(shift + count * ElementBytes(type));
    std::byte* elements = buffer.data() + shift;
    std::int64_t expected = -1;
    for (std::uint64_t bad = random_.Below(4); bad > 0 && count > 0; --bad) {
      const auto at = static_cast<std::int64_t>(random_.Below(count));
      Put(type, elements, static_cast<std::size_t>(at), 0x7fc07fffu);
      if (expected < 0 || at < expected) expected = at;
    }
    ASSERT_EQ(FirstUnusable(*GetParam(), elements, count, type), expected)
        << ElementName(type) << " count " << count << " shift " << shift;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, FirstUnusableTest, testing::ValuesIn(Implementations()),
                         [](const auto& param) {
                           return std::string(ImplementationName(*param.param));
                         });

}  // namespace
}  // namespace tessera::kernels
