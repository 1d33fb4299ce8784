#include "daemon/config/cpu_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/config/limits.h"
#include "tests/fakes/seed.h"

namespace tessera::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::uint32_t> Parsed(std::string_view text) {
  const auto cpus = ParseCpuList(text);
  EXPECT_TRUE(cpus.ok()) << cpus.status();
  return cpus.ok() ? *cpus : std::vector<std::uint32_t>{};
}

std::string ErrorOf(std::string_view text) {
  const auto cpus = ParseCpuList(text);
  if (cpus.ok()) return "(no error)";
  EXPECT_EQ(cpus.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(cpus.status().message());
}

TEST(CpuList, NumbersAndRangesInAnyOrder) {
  EXPECT_THAT(Parsed(""), IsEmpty());
  EXPECT_THAT(Parsed("0"), ElementsAre(0));
  EXPECT_THAT(Parsed("2-3,8"), ElementsAre(2, 3, 8));
  EXPECT_THAT(Parsed("8,2-3,5-5"), ElementsAre(2, 3, 5, 8));
  EXPECT_THAT(Parsed(Concat(kCompactorCpus.max)), ElementsAre(kCompactorCpus.max));
}

TEST(CpuList, RefusalsNameThePart) {
  for (const char* bad : {"x", "1-", "-1", "1-2-3", "+1", " 1", "1 ", "0x1", "1.5", "--", "-",
                          "99999999999999999999"}) {
    EXPECT_THAT(ErrorOf(Concat("7,", bad)), HasSubstr(Concat("\"", bad, "\" is not a CPU number")))
        << bad;
  }
  EXPECT_THAT(ErrorOf(","), HasSubstr("\"\" is not a CPU number"));
  EXPECT_THAT(ErrorOf("1,,2"), HasSubstr("\"\" is not a CPU number"));
  EXPECT_THAT(ErrorOf("1,"), HasSubstr("ends with a comma"));
  EXPECT_THAT(ErrorOf("3-2"), HasSubstr("\"3-2\": the end of the range is below its start"));
  EXPECT_THAT(ErrorOf("2-4,3"), HasSubstr("\"3\": CPU 3 is listed twice"));
  EXPECT_THAT(ErrorOf("4096"), HasSubstr("CPU 4096 is not from 0 to 4095"));
  // Refused before a list of that length is built.
  EXPECT_THAT(ErrorOf("0-4294967295"),
              AllOf(HasSubstr("\"0-4294967295\""), HasSubstr("CPU 4294967295 is not from 0 to")));
}

TEST(CpuList, WritesNeighboursAsRanges) {
  EXPECT_EQ(FormatCpuList({}), "");
  EXPECT_EQ(FormatCpuList({8}), "8");
  EXPECT_EQ(FormatCpuList({2, 3, 8}), "2-3,8");
  EXPECT_EQ(FormatCpuList({0, 2, 4, 5, 6, 4095}), "0,2,4-6,4095");
}

TEST(CpuList, WhatIsWrittenReadsBack) {
  TestRandom random;
  for (int i = 0; i < 500; ++i) {
    const std::uint64_t density = random.Between(1, 8);
    std::vector<std::uint32_t> cpus;
    for (std::uint32_t cpu = 0; cpu < 100; ++cpu) {
      if (random.Below(8) < density) cpus.push_back(cpu);
    }
    const std::string text = FormatCpuList(cpus);
    ASSERT_EQ(Parsed(text), cpus) << text;
  }
}

}  // namespace
}  // namespace tessera::config
