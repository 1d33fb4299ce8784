// Relative budgets, and windows that count towards them.
#include <cmath>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

TEST(DecideBudget, BudgetsAreSharesRoundedDown) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  EXPECT_EQ(DecisionOf("snapkv:budget=0.29,window=8", layer)[0].kept.size(), 29u);
  EXPECT_EQ(DecisionOf("snapkv:budget=0.2999,window=8", layer)[1].kept.size(), 29u);
  EXPECT_EQ(DecisionOf("chunkkv:budget=0.29,window=8", layer)[0].kept.size(), 29u);
  EXPECT_EQ(DecisionOf("snapkv:budget=1,window=8", layer)[0].kept.size(), 100u);
}

// The window covers the whole prompt, whatever the share.
TEST(DecideBudget, OfAShortPromptAllStays) {
  TestRandom random;
  for (const char* text : {"snapkv", "chunkkv", "pyramidkv", "snapkv:budget=0.001"}) {
    for (const std::uint64_t tokens : {1u, 31u, 32u}) {
      ObservedLayer layer({}, ExactOperations(), random);
      layer.Grow(tokens);
      for (const LaneDecision& lane : DecisionOf(text, layer)) {
        EXPECT_EQ(lane.kept.size(), tokens) << text;
      }
    }
  }
}

absl::Status Refused(const std::string& text, ObservedLayer& layer, LayerMemory& memory) {
  const Policy policy = Parsed(text);
  return Decide(policy, layer.Show(NeedsOf(policy), layer.tokens()), memory).status();
}

// The stated minimum is enough, and one token less is not.
TEST(DecideBudget, AShareOfLessThanTheWindowIsRefused) {
  TestRandom random;
  for (const std::string system : {"snapkv", "chunkkv", "pyramidkv"}) {
    for (int round = 0; round < 30; ++round) {
      const std::uint64_t window = random.Between(1, 12);
      const double share = static_cast<double>(random.Between(1, 99)) / 1000;
      ObservedLayer layer({.query_heads = 1, .kv_heads = 1}, ExactOperations(), random);
      layer.Grow(window + random.Between(1, 60));
      const auto entries = [&](double of, std::uint64_t tokens) {
        const double exact = of * static_cast<double>(tokens);
        return static_cast<std::uint64_t>(system == "pyramidkv" ? std::nearbyint(exact)
                                                                : std::floor(exact + 1e-6));
      };
      const auto text = [&](double of) {
        return Concat(system, ":window=", window, ",budget=", of);
      };
      LayerMemory memory;
      const absl::Status status = Refused(text(share), layer, memory);
      if (entries(share, layer.tokens()) >= window) {
        EXPECT_TRUE(status.ok()) << status;
        continue;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(LeavesWhole(status));
      std::uint64_t tokens = window;
      while (entries(share, tokens) < window) ++tokens;
      const std::string message(AsStringView(status.message()));
      EXPECT_THAT(message,
                  HasSubstr(Concat(system, ": budget ", share, " of ", layer.tokens(),
                                   " tokens is ", entries(share, layer.tokens()),
                                   " entries, less than window ", window, ", which counts in it")));
      EXPECT_THAT(message, EndsWith(Concat("and a budget of ", share, " is enough for ", tokens,
                                           " tokens or more")));
      const std::string before = "a budget of ";
      const double enough = std::stod(message.substr(message.find(before) + before.size()));
      EXPECT_TRUE(Refused(text(enough), layer, memory).ok()) << message;
      EXPECT_FALSE(Refused(text(enough * 0.998), layer, memory).ok()) << message;
    }
  }
}

TEST(DecideBudget, ARefusalSaysWhatWouldDo) {
  TestRandom random;
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(100);
  LayerMemory memory;
  const auto said = [&](const std::string& text) {
    return std::string(AsStringView(Refused(text, layer, memory).message()));
  };
  EXPECT_EQ(said("snapkv"),
            "snapkv: budget 0.2 of 100 tokens is 20 entries, less than window 32, which counts in "
            "it; a budget of 0.32 is enough for these tokens, and a budget of 0.2 is enough for "
            "160 tokens or more");
  // kvpress, which defines this rule, rounds halves to even.
  EXPECT_EQ(said("pyramidkv"),
            "pyramidkv: budget 0.2 of 100 tokens is 20 entries, less than window 32, which counts "
            "in it; a budget of 0.315 is enough for these tokens, and a budget of 0.2 is enough "
            "for 158 tokens or more");
  // No number of tokens would be enough.
  EXPECT_EQ(said("chunkkv:budget=0.00000000000000001"),
            "chunkkv: budget 1e-17 of 100 tokens is 0 entries, less than window 32, which counts "
            "in it; a budget of 0.32 is enough for these tokens");
  // A later prompt may use what earlier ones have left.
  EXPECT_FALSE(LeavesWhole(
      Refused("semanticache:budget=0.01,delimiters=0,sink=0,recent=0,max_chunk=8", layer, memory)));
  // Its budget counts chunks.
  EXPECT_EQ(said("chunkkv:mode=kvpress,window=64"), "");
}

}  // namespace
}  // namespace tessera::policies
