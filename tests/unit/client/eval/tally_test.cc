#include "client/eval/tally.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "tests/unit/client/eval/random_plan.h"

namespace tessera::cli::eval {
namespace {

constexpr double kZ = 1.959963985;

// By definition, the interval ends at the shares that are exactly kZ of their own standard
// deviations away from the observed one. Does not use the formula under test.
TEST(Wilson, EndsWhereWhatWasSeenIsJustLikelyEnough) {
  TestRandom random;
  for (int i = 0; i < 1000; ++i) {
    const auto samples = static_cast<std::uint32_t>(random.Between(1, 500));
    const auto right = static_cast<std::uint32_t>(random.Below(samples + 1));
    const Interval sure = WilsonInterval(right, samples);
    const double seen = static_cast<double>(right) / samples;
    EXPECT_LE(sure.low, seen);
    EXPECT_GE(sure.high, seen);
    for (const double end : {sure.low, sure.high}) {
      if (end == 0 || end == 1) continue;
      const double deviation = std::sqrt(end * (1 - end) / samples);
      EXPECT_NEAR(std::fabs(seen - end), kZ * deviation, 1e-9) << right << " of " << samples;
    }
    const Interval mirrored = WilsonInterval(samples - right, samples);
    EXPECT_NEAR(mirrored.low, 1 - sure.high, 1e-12);
  }
}

TEST(Wilson, KnowsNothingOfNoSamples) {
  EXPECT_EQ(WilsonInterval(0, 0).low, 0);
  EXPECT_EQ(WilsonInterval(0, 0).high, 1);
}

// Draws samples for two policies with mostly equal answers: the interval contains the true
// difference about 19 times out of 20.
TEST(Pairs, AreSureOfADifferenceAsOftenAsTheySay) {
  TestRandom random;
  for (const auto& [gained, lost] :
       {std::pair{0.04, 0.04}, {0.01, 0.08}, {0.2, 0.05}, {0.0, 0.0}}) {
    constexpr int kTrials = 2000;
    int inside = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      Pairs pairs = {.samples = 200};
      for (std::uint32_t i = 0; i < pairs.samples; ++i) {
        const double drawn = static_cast<double>(random.Below(1'000'000)) / 1e6;
        pairs.gained += drawn < gained ? 1 : 0;
        pairs.lost += drawn >= gained && drawn < gained + lost ? 1 : 0;
      }
      const Interval sure = DifferenceInterval(pairs);
      EXPECT_LE(sure.low, pairs.difference());
      EXPECT_GE(sure.high, pairs.difference());
      inside += sure.low <= gained - lost && gained - lost <= sure.high ? 1 : 0;
    }
    EXPECT_GT(inside, 0.93 * kTrials) << gained << " and " << lost;
    if (gained + lost > 0) {
      EXPECT_LT(inside, 0.985 * kTrials) << gained << " and " << lost;
    }
  }
  EXPECT_EQ(DifferenceInterval({}).low, -1);
  EXPECT_EQ(DifferenceInterval({}).high, 1);
}

// Compares sample by sample, where both have an answer.
TEST(Results, ArePairedSampleBySample) {
  EvaluationPlan plan = {.policies = {{.text = "dense"}, {.text = "chunkkv"}},
                         .tasks = {"niah_single", "vt2"},
                         .lengths = {512},
                         .depths = {0.5},
                         .samples = 5};
  Results results(plan);
  ASSERT_EQ(results.units().size(), 2u);
  results.Add({.unit = 0, .outcomes = {{.marks = "1101-"}, {.marks = "10-11"}}});
  results.Add({.unit = 1, .outcomes = {{.marks = "00000"}, {.marks = "11000"}}});
  const auto all = [](const Unit&) { return true; };
  const Pairs pairs = results.PairsOf(1, 0, all);
  EXPECT_EQ(pairs.samples, 8u);
  EXPECT_EQ(pairs.gained, 2u);
  EXPECT_EQ(pairs.lost, 1u);
  const Pairs turned = results.PairsOf(0, 1, all);
  EXPECT_EQ(turned.gained, pairs.lost);
  EXPECT_EQ(turned.lost, pairs.gained);
  const Pairs some = results.PairsOf(1, 0, [](const Unit& unit) { return unit.task == "vt2"; });
  EXPECT_EQ(some.samples, 5u);
  EXPECT_EQ(some.gained, 2u);
}

// Sums over any selection of units equal the sums over single outcomes; means are weighted by
// samples.
TEST(Results, SumUpWhatIsFinished) {
  TestRandom random;
  const EvaluationPlan plan = RandomPlan(random);
  Results results(plan);
  std::vector<FinishedUnit> finished;
  for (std::size_t i = 0; i < results.units().size(); ++i) {
    if (random.OneIn(4)) continue;
    finished.push_back(RandomUnit(random, plan, i));
    results.Add(finished.back());
  }
  for (std::size_t policy = 0; policy < plan.policies.size(); ++policy) {
    std::uint32_t right = 0, samples = 0;
    double bytes = 0;
    bool refused = false, not_packed = false;
    for (const FinishedUnit& unit : finished) {
      const Outcome& outcome = unit.outcomes[policy];
      refused = refused || !outcome.refused.empty();
      not_packed = not_packed || !outcome.not_packed.empty();
      if (results.units()[unit.unit].depth > 0.4) continue;
      right += outcome.right;
      samples += outcome.samples;
      bytes += outcome.bytes_kept * outcome.samples;
    }
    const Tally tally = results.Of(policy, [](const Unit& unit) { return unit.depth <= 0.4; });
    EXPECT_EQ(tally.right, right);
    EXPECT_EQ(tally.samples, samples);
    EXPECT_EQ(tally.empty(), samples == 0);
    if (samples != 0) {
      EXPECT_NEAR(tally.bytes_kept(), bytes / samples, 1e-12);
    }
    EXPECT_EQ(!results.WhyRefused(policy).empty(), refused);
    EXPECT_EQ(!results.WhyNotPacked(policy).empty(), not_packed);
  }
}

}  // namespace
}  // namespace tessera::cli::eval
