#include "client/eval/plan.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/unit/client/eval/random_plan.h"

namespace tessera::cli::eval {
namespace {

TEST(PolicyAt, PutsItsBudgetInPlace) {
  const PolicyAt share = {.text = "chunkkv:budget={}+mosaickv:keep={}", .budget = 0.35};
  EXPECT_EQ(share.For(1000), "chunkkv:budget=0.35+mosaickv:keep=0.35");
  EXPECT_EQ(share.Name(), share.For(77));
  const PolicyAt count = {.text = "h2o:heavy={tokens/2},recent={tokens}", .budget = 0.2};
  EXPECT_EQ(count.For(1024), "h2o:heavy=102,recent=204");
  EXPECT_EQ(count.For(1), "h2o:heavy=1,recent=1");  // no policy keeps no tokens
  EXPECT_EQ(count.Name(), "h2o:heavy=10%,recent=20%");
  EXPECT_EQ((PolicyAt{.text = "dense"}.For(9)), "dense");
  EXPECT_FALSE(PolicyAt::HasPlace("mosaickv:keep=0.25"));
  EXPECT_TRUE(PolicyAt::HasPlace("streaming:budget={tokens}"));
}

// A share that is mathematically a whole number gives that number, despite rounding in double.
TEST(PolicyAt, CountsWholeTokens) {
  for (std::uint32_t percent = 1; percent <= 100; ++percent) {
    const PolicyAt policy = {.text = "{tokens}", .budget = percent / 100.0};
    EXPECT_EQ(policy.For(1000), std::to_string(percent * 10));
  }
}

TEST(Plan, HasEachUnitOnce) {
  TestRandom random;
  const EvaluationPlan plan = RandomPlan(random);
  std::set<std::tuple<Question, std::uint32_t, std::string, double>> seen;
  for (const Unit& unit : UnitsOf(plan)) {
    EXPECT_TRUE(seen.insert({unit.question, unit.length, unit.task, unit.depth}).second);
  }
  EXPECT_EQ(seen.size(),
            plan.questions.size() * plan.lengths.size() * plan.tasks.size() * plan.depths.size());
}

}  // namespace
}  // namespace tessera::cli::eval
