// How many tokens a policy says it keeps is what its decision keeps.

#include "daemon/policies/tokens/kept_tokens.h"

#include <gtest/gtest.h>

#include "daemon/base/strings.h"
#include "daemon/policies/least_tokens.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

// Mean entries per lane over the layers; nullopt: the prompt is too short for the budget.
std::optional<double> DecidedEntries(const Policy& policy, std::uint64_t tokens,
                                     TestRandom& random) {
  constexpr std::uint32_t kLayers = 4;
  double entries = 0;
  double lanes = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    ObservedLayer observed({.layer = layer, .layers = kLayers}, ExactOperations(), random);
    observed.Grow(tokens);
    observed.text().assign(tokens, TextMark::kInside);
    for (std::uint64_t i = 0; i < tokens; i += 9) observed.text()[i] = TextMark::kDelimiter;
    LayerMemory memory;
    const auto decision = Decide(policy, observed.Show(NeedsOf(policy), tokens), memory);
    if (!decision.ok()) {
      // Whether keys can be merged as far as a budget wants, only the keys know.
      EXPECT_TRUE(policy.merging.has_value() || LeavesWhole(decision.status()))
          << policy.text << ": " << decision.status();
      return std::nullopt;
    }
    for (const LaneDecision& lane : *decision) {
      entries += static_cast<double>(lane.kept.size());
      ++lanes;
    }
  }
  return entries / lanes;
}

TEST(KeptTokensTest, IsWhatTheDecisionKeeps) {
  TestRandom random;
  for (const char* text :
       {"chunkkv:budget=0.3", "chunkkv:tokens=50", "chunkkv:mode=kvpress,budget=0.4,window=8",
        "chunkkv:mode=kvpress,chunk=7,budget=0.25,window=8", "snapkv:budget=0.5,window=16",
        "snapkv:tokens=40", "pyramidkv:budget=0.5,window=8", "pyramidkv:tokens=60,window=8",
        "semantickv:sink=8,keep_total=0.3", "semantickv:sink=8,keep_middle=0.5", "tova:budget=40",
        "h2o:heavy=20,recent=20", "streaming:sink=4,recent=40", "lacache:budget=64,span=2",
        "semanticache:tau=0.9,sink=4,recent=8", "semanticache:budget=0.6,sink=4,recent=8",
        "chunkkv:budget=0.5+semanticache:tau=0.9,sink=4,recent=8"}) {
    const Policy policy = Parsed(text);
    for (int round = 0; round < 3; ++round) {
      const std::uint64_t tokens = random.Between(20, 180);
      SCOPED_TRACE(Concat(text, " of ", tokens, " tokens"));
      const std::optional<double> decided = DecidedEntries(policy, tokens, random);
      const auto kept = KeptTokensOf(policy, tokens);
      if (!decided.has_value()) {
        EXPECT_TRUE(policy.merging.has_value() || LeavesWhole(kept.status()));
        continue;
      }
      ASSERT_TRUE(kept.ok()) << kept.status();
      EXPECT_LE(static_cast<double>(kept->least), *decided);
      EXPECT_GE(static_cast<double>(kept->most), *decided);
    }
  }
}

// The range is a single number where the options decide alone.
TEST(KeptTokensTest, IsExactForBudgets) {
  for (const char* text : {"chunkkv:budget=0.3", "snapkv:budget=0.3", "tova:budget=300",
                           "h2o:heavy=100,recent=200", "semantickv:sink=4,keep_total=0.3"}) {
    const auto kept = KeptTokensOf(Parsed(text), 1000);
    ASSERT_TRUE(kept.ok()) << kept.status();
    EXPECT_EQ(kept->least, 300u) << text;
    EXPECT_EQ(kept->most, 300u) << text;
  }
}

}  // namespace
}  // namespace tessera::policies
