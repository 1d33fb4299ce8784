// One policy decides which tokens are kept, another one merges the kept tokens.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/unit/policies/decide.h"

namespace tessera::policies {
namespace {

// Keys of a few kinds, and sentences.
void MakePrompt(ObservedLayer& layer, std::uint64_t tokens, TestRandom& random) {
  layer.Grow(tokens);
  layer.text().resize(tokens);
  for (TextMark& mark : layer.text()) {
    mark = random.OneIn(14) ? TextMark::kDelimiter : TextMark::kInside;
  }
  std::vector<ObservedLayer::Row> kinds;
  for (int i = 0; i < 3; ++i) kinds.push_back(layer.RandomRow());
  for (auto& lane : layer.lanes()) {
    for (ObservedLayer::Entry& entry : lane) {
      const ObservedLayer::Row& kind = random.Pick(kinds);
      for (std::size_t c = 0; c < kind.size(); ++c) {
        entry.key[c] = kernels::Bf16ToFloat(kernels::FloatToBf16(kind[c] + 0.4f * entry.key[c]));
      }
    }
  }
}

// As if evicted tokens had never existed.
TEST(DecideBoth, WhatStaysIsMerged) {
  TestRandom random;
  int merged = 0;
  for (int round = 0; round < 60; ++round) {
    ObservedLayer layer(RandomForm(random), ExactOperations(), random);
    MakePrompt(layer, random.Between(40, 120), random);
    const char* const selectors[] = {
        "snapkv:budget=0.6,window=8,kernel=3", "chunkkv:budget=0.5,window=8,chunk=5",
        "chunkkv:tokens=30,window=8,scope=head", "pyramidkv:budget=0.5,window=8",
        "semantickv:sink=4,recent_ratio=0.05,keep_total=0.5,lambda=0.1"};
    const std::string selector = random.Pick(selectors);
    const std::string merger =
        Concat("semanticache:sink=", random.Below(4), ",recent=", random.Below(6),
               ",max_chunk=", random.Between(4, 64), random.OneIn(3) ? ",budget=0.4" : ",tau=0.5",
               random.OneIn(3) ? ",delimiters=0" : "");
    SCOPED_TRACE(Concat(selector, "+", merger));
    const LayerDecision stay = DecisionOf(selector, layer);
    ObservedLayer left = layer;
    for (std::size_t lane = 0; lane < stay.size(); ++lane) {
      left.lanes()[lane].clear();
      for (const std::uint32_t i : stay[lane].kept) {
        left.lanes()[lane].push_back(layer.lanes()[lane][i]);
      }
    }
    LayerMemory memory, memory_of_both;
    const Policy alone = Parsed(merger);
    const auto expected = Decide(alone, left.Show(NeedsOf(alone), left.tokens()), memory);
    const Policy both = Parsed(Concat(merger, "+", selector));
    const auto decision = Decide(both, layer.Show(NeedsOf(both), layer.tokens()), memory_of_both);
    ASSERT_EQ(decision.status().code(), expected.status().code()) << decision.status();
    if (!expected.ok()) continue;  // an unreachable budget
    for (std::size_t lane = 0; lane < stay.size(); ++lane) {
      const auto among_all = [&](Indices32 entries) {
        for (std::uint32_t& entry : entries) entry = stay[lane].kept[entry];
        return entries;
      };
      EXPECT_EQ((*decision)[lane].kept, among_all((*expected)[lane].kept));
      EXPECT_EQ((*decision)[lane].begins, (*expected)[lane].begins);
      EXPECT_EQ((*decision)[lane].members, among_all((*expected)[lane].members));
      merged += (*decision)[lane].merges() ? 1 : 0;
    }
  }
  EXPECT_GT(merged, 30);
}

// Chunks of text also end at evicted tokens.
TEST(DecideBoth, EveryTokenMustBeNamed) {
  TestRandom random;
  ObservedLayer layer(RandomForm(random), ExactOperations(), random);
  MakePrompt(layer, 100, random);
  layer.text()[1] = TextMark::kNotShown;
  const Policy both = Parsed("chunkkv:window=8,tokens=8+semanticache:sink=0,recent=0");
  LayerMemory memory;
  const absl::Status status =
      Decide(both, layer.Show(NeedsOf(both), layer.tokens()), memory).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(AsStringView(status.message())), testing::HasSubstr("id of token 1"));
}

// A second prompt may be too short for its share alone, but may use what the first one has left.
TEST(DecideBoth, ABudgetIsOfTheWholeSequence) {
  TestRandom random;
  ObservedLayer layer({.query_heads = 2, .kv_heads = 2}, ExactOperations(), random);
  layer.Grow(60);
  for (auto& lane : layer.lanes()) {  // zero keys are not similar to any, so nothing can merge
    for (ObservedLayer::Entry& entry : lane) std::ranges::fill(entry.key, 0.0f);
  }
  const Policy policy = Parsed("semanticache:budget=0.35,delimiters=0");
  LayerMemory memory;
  LayerView view = layer.Show(NeedsOf(policy), layer.tokens());
  EXPECT_EQ(Decide(policy, view, memory).status().code(), absl::StatusCode::kInvalidArgument);
  std::vector<LaneEntries> lanes(view.lanes.begin(), view.lanes.end());
  view.lanes = lanes;
  view.first = 1000;
  for (const std::uint64_t before : {130, 311, 312, 900}) {  // the budget is 371 of 1060
    for (LaneEntries& lane : lanes) lane.before = before;
    EXPECT_EQ(Decide(policy, view, memory).ok(), before <= 311) << before;
  }
}

TEST(DecideBoth, BothAreAskedFor) {
  const Needs needs = NeedsOf(Parsed("semanticache+chunkkv:window=16"));
  EXPECT_EQ(needs, (Needs{.last_queries = 16, .token_ids = true}));
  EXPECT_EQ(Parsed("semanticache:tau=0.5+mosaickv+snapkv").text,
            "snapkv+semanticache:tau=0.5+mosaickv");
}

// Chunks that have been clustered stay as they are when more comes; the one that goes on does not.
TEST(DecideSemantic, ChunksAreClusteredOnce) {
  TestRandom random;
  const std::string text = "semanticache:tau=0.05,sink=0,recent=0,max_chunk=16,delimiters=0";
  ObservedLayer layer({}, ExactOperations(), random);
  layer.Grow(72);
  LayerMemory memory;
  layer.Apply(DecisionOf(text, layer, memory));
  EXPECT_EQ(memory.clustered_until, 72u);
  const auto before = layer.lanes();
  layer.Grow(40);
  const LayerDecision decision = DecisionOf(text, layer, memory);
  for (std::size_t lane = 0; lane < decision.size(); ++lane) {
    ASSERT_TRUE(decision[lane].merges());
    std::uint32_t ended = 0;  // entries of the four chunks that were full
    while (ended < before[lane].size() && before[lane][ended].position < 64) ++ended;
    for (std::uint32_t i = 0; i < ended; ++i) {
      EXPECT_EQ(decision[lane].kept[i], i);
      EXPECT_EQ(decision[lane].begins[i + 1], i + 1) << "it stands for itself alone";
    }
  }
  memory.CutTo(50, 50);
  EXPECT_EQ(memory.clustered_until, 50u);
}

}  // namespace
}  // namespace tessera::policies
