#include "daemon/base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "daemon/base/strings.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(FormatBytes, WritesOneDecimal) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(64 * kMiB), "64.0 MiB");
  EXPECT_EQ(FormatBytes(kGiB + kGiB / 2), "1.5 GiB");
  EXPECT_EQ(FormatBytes(kMiB - 1), "1.0 MiB") << "rounding must carry into the next unit";
  EXPECT_EQ(FormatBytes(std::numeric_limits<std::uint64_t>::max()), "16.0 EiB");
}

TEST(FormatBytes, IsWithinHalfATenthOfTheUnit) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t bytes = random() >> (random() % 64);
    const std::string text = FormatBytes(bytes);
    const double number = std::stod(text);
    const std::string unit = text.substr(text.find(' ') + 1);
    const double scale = std::pow(1024.0, std::string("BKMGTPE").find(unit[0]));
    EXPECT_NEAR(number, static_cast<double>(bytes) / scale, 0.05 + 1e-9) << bytes;
  }
}

TEST(ParseBytes, AcceptsWhatPeopleWrite) {
  EXPECT_EQ(*ParseBytes("0"), 0u);
  EXPECT_EQ(*ParseBytes("4096"), 4096u);
  EXPECT_EQ(*ParseBytes("512B"), 512u);
  EXPECT_EQ(*ParseBytes("512MiB"), 512 * kMiB);
  EXPECT_EQ(*ParseBytes(" 8 GiB "), 8 * kGiB);
  EXPECT_EQ(*ParseBytes("8Gi"), 8 * kGiB);
  EXPECT_EQ(*ParseBytes("2m"), 2 * kMiB);
  EXPECT_EQ(*ParseBytes("1.5G"), kGiB + kGiB / 2);
  EXPECT_EQ(*ParseBytes("0.015625E"), 16 * kTiB * 1024);
  EXPECT_EQ(*ParseBytes("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
}

TEST(ParseBytes, RefusesTheRestByName) {
  for (const char* text :
       {"", " ", "-1", "+1", "x", ".5G", "1.", "1.G", "1.5", "0.1K", "1GB", "1GiBs", "1 G iB",
        "1e9", "0x10", "18446744073709551616", "16EiB", "99999999999999999999", "1.0000001G"}) {
    const auto parsed = ParseBytes(text);
    ASSERT_FALSE(parsed.ok()) << text << " -> " << *parsed;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(parsed.status().message(), HasSubstr(Concat("\"", text, "\"")));
  }
}

TEST(ParseBytes, ReadsBackEveryWholeNumberOfUnits) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const std::string units = "KMGTPE";
  for (int i = 0; i < 2000; ++i) {
    const int unit = static_cast<int>(random() % units.size());
    const int shift = 10 * (unit + 1);
    const std::uint64_t whole = random() >> shift >> (random() % 20);
    const std::string text = std::to_string(whole) + units[unit] + "iB";
    const auto parsed = ParseBytes(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, whole << shift) << text;
  }
}

}  // namespace
}  // namespace tessera
