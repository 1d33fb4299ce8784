// The report of a benchmark: how a row reads in the table, warnings, and the earlier run.

#include "client/tools/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::cli::bench {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(RowTest, TheGoalSaysWhatItJudges) {
  const Row on_value = {.name = "added",
                        .value = 0.04,
                        .unit = "us",
                        .ratio = 1.21,
                        .goal = 1,
                        .sense = Goal::kAtMost,
                        .goal_is_on_ratio = false};
  EXPECT_EQ(on_value.GoalText(), "value <= 1.00 us");
  EXPECT_EQ(on_value.Holds(), true);
  const Row on_ratio = {.name = "packed", .value = 3, .unit = "ns/token", .ratio = 1.9, .goal = 2};
  EXPECT_EQ(on_ratio.GoalText(), "ratio >= 2.00");
  EXPECT_EQ(on_ratio.Holds(), false);
  const Row without_ratio = {.name = "calls", .value = 1, .unit = "calls", .goal = 2};
  EXPECT_EQ(without_ratio.GoalText(), "value >= 2.00 calls");
  EXPECT_EQ(Row{.name = "none"}.GoalText(), "-");
}

TEST(RowTest, TheComparisonIsInWords) {
  const auto text = [](const char* unit, double ratio, Goal sense) {
    return Row{.unit = unit, .ratio = ratio, .sense = sense}.AgainstBaseline();
  };
  EXPECT_EQ(text("tokens/s", 0.8, Goal::kAtMost), "1.25x faster");
  EXPECT_EQ(text("us", 1.21, Goal::kAtMost), "1.21x slower");
  EXPECT_EQ(text("ns/token", 2, Goal::kAtLeast), "2.00x faster");
  EXPECT_EQ(text("GB/s", 0.5, Goal::kAtLeast), "2.00x slower");
  EXPECT_EQ(text("B", 3, Goal::kAtLeast), "3.00x smaller");
  EXPECT_EQ(text("KiB of tiles", 1.05, Goal::kAtMost), "1.05x larger");
  EXPECT_EQ(text("rel. error", 0.5, Goal::kAtMost), "2.00x better");
  EXPECT_EQ(text("us", 1.001, Goal::kAtMost), "same");
  EXPECT_EQ(text("us", 0, Goal::kAtMost), "-");
  EXPECT_EQ(Row{.unit = "us"}.AgainstBaseline(), "-");
}

TEST(ReportTest, APairedRatioIsMarkedAndExplained) {
  Report report{.name = "serve"};
  report.Add({.name = "own", .value = 100, .unit = "tokens/s"});
  Row row = {.name = "daemon",
             .value = 93,
             .unit = "tokens/s",
             .baseline = "own",
             .ratio = 0.863,
             .paired = true,
             .sense = Goal::kAtMost};
  report.Add(row);
  EXPECT_THAT(report.Text(), AllOf(HasSubstr("0.863  1.16x faster *"),
                                   HasSubstr("below 1 is better than the baseline"),
                                   HasSubstr("*: the median of ratios within a round")));
  EXPECT_THAT(report.Text(), Not(HasSubstr("earlier")));
  report.rows.back().paired = false;
  EXPECT_THAT(report.Text(), Not(HasSubstr("*")));
}

TEST(ReportTest, WarnsOfALoadedMachine) {
  Report report{.name = "serve"};
  report.Add({.name = "calm", .p50_ms = 1, .p99_ms = 5});
  EXPECT_THAT(report.Warnings(), IsEmpty());
  EXPECT_THAT(report.Json(), Not(HasSubstr("warnings")));
  report.load_average = 1e6;
  report.Add({.name = "shaken", .p50_ms = 1, .p99_ms = 5.1});
  EXPECT_THAT(report.Warnings(),
              ElementsAre(HasSubstr("load average 1000000, "), HasSubstr("5 times p50 in shaken")));
  EXPECT_THAT(report.Text(), HasSubstr("\nwarning: the machine was loaded"));
  EXPECT_THAT(report.Json(), HasSubstr("\"warnings\": ["));
}

TEST(ReportTest, ShowsTheChangeSinceAnEarlierRun) {
  Report report{.name = "scale"};
  report.Add({.name = "slower", .value = 110, .unit = "us"});
  report.Add({.name = "new", .value = 1, .unit = "us"});
  report.Add({.name = "zero", .value = 1, .unit = "calls"});
  report.earlier = EarlierRun{"old.json", Machine(), {{"slower", 100}, {"zero", 0}}};
  EXPECT_THAT(report.Warnings(), IsEmpty());
  EXPECT_THAT(report.Text(), AllOf(HasSubstr("    100  +10.0 %"), HasSubstr("old.json")));
  EXPECT_THAT(report.Json(), AllOf(HasSubstr("\"earlier\": 100, \"change_percent\": 10"),
                                   HasSubstr("\"earlier\": 0, \"change_percent\": null")));
  report.earlier->values["gone"] = 1;
  report.earlier->machine = "another";
  EXPECT_THAT(report.Warnings(),
              ElementsAre(HasSubstr("another machine (another)"), HasSubstr("lacks: gone")));
}

}  // namespace
}  // namespace tessera::cli::bench
