// The contract of all token policies: one instance per row of the registry and per implementation
// of the kernels.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"
#include "daemon/policies/token_system.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/policy/policy_promises.h"
#include "tests/fakes/observed_layer.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

struct Subject {
  const Promise* promise;
  const kernels::Implementation* implementation;
};

Policy Parsed(std::string_view text) {
  absl::StatusOr<Policy> policy = ParsePolicy(text);
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? *std::move(policy) : Policy{};
}

// Subjects whose promise satisfies the predicate.
std::vector<Subject> SubjectsThat(bool (*promise)(const Promise&)) {
  std::vector<Subject> subjects;
  for (const Promise& one : Promises()) {
    if (!promise(one)) continue;
    for (const kernels::Implementation* implementation : kernels::Implementations()) {
      if (kernels::ImplementationSupported(*implementation)) {
        subjects.push_back({&one, implementation});
      }
    }
  }
  return subjects;
}

std::string NameOf(const testing::TestParamInfo<Subject>& subject) {
  return Concat(subject.param.promise->row, "_", subject.param.promise->as, "_",
                kernels::ImplementationName(*subject.param.implementation));
}

class TokenPolicies : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    promise_ = *GetParam().promise;
    policy_ = Parsed(promise_.text);
  }

  const kernels::Operations& operations() const {
    return kernels::OperationsOf(*GetParam().implementation);
  }
  ObservedLayer Layer(std::uint64_t tokens, ObservedLayerOptions options = {.layer = 1}) {
    options.type = random_.OneIn(2) ? kernels::ElementType::kBf16 : kernels::ElementType::kFp32;
    ObservedLayer layer(options, operations(), random_);
    layer.Grow(tokens);
    return layer;
  }
  LayerView AllOf(ObservedLayer& layer) { return Shown(layer, layer.tokens()); }
  // Policies without needs have no keys to score.
  LayerView Shown(ObservedLayer& layer, std::uint64_t first_decoded) {
    LayerView view = layer.Show(NeedsOf(policy_), first_decoded);
    if (NeedsOf(policy_) == Needs()) view.scorer = nullptr;
    return view;
  }
  LayerDecision Decided(ObservedLayer& layer) {
    absl::StatusOr<LayerDecision> decision = Decide(policy_, AllOf(layer), memory_);
    EXPECT_TRUE(decision.ok()) << decision.status();
    return decision.ok() ? *std::move(decision) : KeepEverything(layer);
  }
  absl::StatusOr<LayerDecision> Advanced(ObservedLayer& layer, std::uint64_t more,
                                         LayerMemory& memory) {
    const std::vector<std::uint64_t> held = Counts(layer);
    const std::uint64_t first = layer.tokens();
    layer.Grow(more);
    return Advance(policy_, Shown(layer, first), held, memory);
  }
  static std::vector<std::uint64_t> Counts(ObservedLayer& layer) {
    std::vector<std::uint64_t> counts;
    for (const auto& lane : layer.lanes()) counts.push_back(lane.size());
    return counts;
  }
  static LayerDecision KeepEverything(ObservedLayer& layer) {
    LayerDecision decision;
    for (std::size_t lane = 0; lane < layer.lanes().size(); ++lane) {
      decision.push_back({.kept = layer.AllOf(lane)});
    }
    return decision;
  }
  static void ExpectSame(const LayerDecision& a, const LayerDecision& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t lane = 0; lane < a.size(); ++lane) {
      EXPECT_EQ(a[lane].kept, b[lane].kept) << lane;
      EXPECT_EQ(a[lane].begins, b[lane].begins) << lane;
      EXPECT_EQ(a[lane].members, b[lane].members) << lane;
    }
  }
  static void ExpectSame(const LayerMemory& a, const LayerMemory& b) {
    EXPECT_EQ(a.cursor, b.cursor);
    EXPECT_EQ(a.capacity, b.capacity);
    EXPECT_EQ(a.scores, b.scores);
    EXPECT_EQ(a.boundaries, b.boundaries);
  }

  // Entries are ascending, unique and within the lane. Members each belong to one entry, which is
  // the first of its members.
  void ExpectWellFormed(const LayerDecision& decision, ObservedLayer& layer) const {
    ASSERT_EQ(decision.size(), layer.lanes().size());
    for (std::size_t lane = 0; lane < decision.size(); ++lane) {
      const LaneDecision& of_lane = decision[lane];
      ASSERT_FALSE(of_lane.kept.empty());
      ASSERT_TRUE(std::ranges::is_sorted(of_lane.kept, std::less_equal<>()));
      ASSERT_LT(of_lane.kept.back(), layer.lanes()[lane].size());
      if (!of_lane.merges()) {
        EXPECT_TRUE(of_lane.members.empty());
        continue;
      }
      ASSERT_EQ(of_lane.begins.size(), of_lane.kept.size() + 1);
      ASSERT_EQ(of_lane.begins.front(), 0u);
      ASSERT_EQ(of_lane.begins.back(), of_lane.members.size());
      std::vector<int> times(layer.lanes()[lane].size());
      for (std::size_t i = 0; i < of_lane.kept.size(); ++i) {
        ASSERT_LT(of_lane.begins[i], of_lane.begins[i + 1]);
        const auto members =
            std::span(of_lane.members)
                .subspan(of_lane.begins[i], of_lane.begins[i + 1] - of_lane.begins[i]);
        ASSERT_EQ(members.front(), of_lane.kept[i]);
        ASSERT_TRUE(std::ranges::is_sorted(members, std::less_equal<>()));
        for (const std::uint32_t member : members) ++times[member];
      }
      // Policies that only merge assign every entry to a group.
      EXPECT_EQ(std::ranges::count(times, 1) + std::ranges::count(times, 0), std::ssize(times));
      EXPECT_TRUE(policy_.tokens.has_value() || std::ranges::count(times, 0) == 0);
    }
  }

  TestRandom random_;
  Promise promise_;
  Policy policy_;
  LayerMemory memory_;
};

// Policies whose merged entries do not merge again.
class PoliciesThatMergeOnce : public TokenPolicies {};
class PoliciesWithObservations : public TokenPolicies {};
class PoliciesThatContinue : public TokenPolicies {};
class PoliciesObservingWhileDecoding : public TokenPolicies {};

TEST_P(TokenPolicies, TheBudgetIsKeptExactlyAtAnyLength) {
  for (int round = 0; round < 6; ++round) {
    std::uint64_t tokens = 100;
    std::uint64_t entries = promise_.entries;
    if (round > 0 && promise_.entries_of != nullptr) {
      tokens = 100 * random_.Between(2, 6);
      entries = promise_.entries_of(tokens);
    } else if (round > 0) {
      // A pyramid larger than the prompt gives its layers other budgets.
      tokens = random_.Between(promise_.row == "pyramidkv" ? 100 : entries, 600);
    }
    SCOPED_TRACE(tokens);
    ObservedLayer layer = Layer(tokens);
    memory_ = {};
    const LayerDecision decision = Decided(layer);
    ExpectWellFormed(decision, layer);
    std::uint64_t together = 0;
    for (const LaneDecision& lane : decision) {
      together += lane.kept.size();
      EXPECT_TRUE(promise_.at_most || lane.kept.size() == entries) << lane.kept.size();
    }
    EXPECT_LE(together, entries * decision.size());
  }
}

TEST_P(TokenPolicies, WhatIsToStayStays) {
  for (int round = 0; round < 10; ++round) {
    ObservedLayer layer = Layer(random_.Between(100, 300));
    memory_ = {};
    for (const LaneDecision& lane : Decided(layer)) {
      for (std::uint32_t i = 0; i < promise_.sink; ++i) EXPECT_EQ(lane.kept[i], i);
      for (std::uint64_t i = 1; i <= promise_.recent; ++i) {
        EXPECT_EQ(lane.kept[lane.kept.size() - i], layer.tokens() - i);
      }
    }
  }
}

TEST_P(TokenPolicies, ShortPromptsAreLeftAlone) {
  for (const std::uint64_t tokens : {1u, 2u, 7u}) {
    ObservedLayer layer = Layer(tokens);
    memory_ = {};
    ExpectSame(Decided(layer), KeepEverything(layer));
  }
}

TEST_P(TokenPolicies, WhereAllIsEqualTheDecisionIsTheSameEveryTime) {
  ObservedLayer layer = Layer(100);
  for (auto& lane : layer.lanes()) {
    for (auto& entry : lane) entry.key = layer.lanes()[0][0].key;
  }
  for (auto& head : layer.queries()) {
    for (auto& row : head) row = layer.queries()[0][0];
  }
  const LayerDecision decision = Decided(layer);
  ExpectWellFormed(decision, layer);
  for (int again = 0; again < 3; ++again) {
    memory_ = {};
    ExpectSame(Decided(layer), decision);
  }
  for (const LaneDecision& lane : decision) EXPECT_EQ(lane.kept, decision[0].kept);
}

TEST_P(TokenPolicies, ZeroKeysAndNanAreNoExceptions) {
  ObservedLayer layer = Layer(100);
  for (auto& lane : layer.lanes()) {
    for (auto& entry : lane) std::ranges::fill(entry.key, 0.0f);
  }
  if (promise_.wants_likeness) {
    const absl::Status status = Decide(policy_, AllOf(layer), memory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return;
  }
  ExpectWellFormed(Decided(layer), layer);
  for (auto& head : layer.queries()) {
    for (auto& row : head) {
      if (random_.OneIn(2)) row[0] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  memory_ = {};
  const LayerDecision decision = Decided(layer);
  ExpectWellFormed(decision, layer);
  if (promise_.at_most) return;
  EXPECT_EQ(decision[0].kept.size(), promise_.entries);
}

TEST_P(TokenPolicies, RaggedLanesAreDecidedOneByOneOrRefused) {
  ObservedLayer layer = Layer(100);
  layer.lanes()[1].erase(layer.lanes()[1].begin() + 20, layer.lanes()[1].begin() + 50);
  const absl::StatusOr<LayerDecision> decision = Decide(policy_, AllOf(layer), memory_);
  if (promise_.one_for_all) {
    EXPECT_EQ(decision.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(AsStringView(decision.status().message())),
                HasSubstr("lanes hold 100 and 70 entries"));
    return;
  }
  ASSERT_TRUE(decision.ok()) << decision.status();
  ExpectWellFormed(*decision, layer);
  for (const LaneDecision& lane : *decision) {
    if (promise_.at_most) continue;
    EXPECT_EQ(lane.kept.size(), promise_.entries);
  }
}

TEST_P(PoliciesThatMergeOnce, WhereNothingHasComeNothingGoes) {
  ObservedLayer layer = Layer(100);
  layer.Apply(Decided(layer));
  if (NeedsOf(policy_).attention_sums) {
    // Earlier attention is remembered, and no query has come since.
    LayerView view = AllOf(layer);
    std::vector<std::vector<float>> nothing;
    for (const auto& lane : layer.lanes()) nothing.emplace_back(lane.size());
    const std::vector<std::span<const float>> sums(nothing.begin(), nothing.end());
    view.sums = sums;
    const auto again = Decide(policy_, view, memory_);
    ASSERT_TRUE(again.ok()) << again.status();
    ExpectSame(*again, KeepEverything(layer));
    return;
  }
  ExpectSame(Decided(layer), KeepEverything(layer));
}

// The error names the policy and the call of a missing observation, and nothing changes.
TEST_P(PoliciesWithObservations, MissingObservationsAreReported) {
  const Needs needs = NeedsOf(policy_);
  ObservedLayer layer = Layer(100);
  layer.Apply(Decided(layer));
  layer.Grow(100);
  const LayerMemory before = memory_;
  const auto expect_missed = [&](const LayerView& view) {
    const absl::Status status = Decide(policy_, view, memory_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    const std::string message(AsStringView(status.message()));
    // With two policies the error names the one that misses the observation.
    const std::string_view misses =
        policy_.tokens.has_value() ? KindOf(*policy_.tokens).name : promise_.row;
    EXPECT_THAT(message, HasSubstr(Concat(misses, ": ")));
    EXPECT_THAT(message, HasSubstr("not been observed; the worker must call Observe first"));
    ExpectSame(memory_, before);
  };
  expect_missed(layer.Show({}, layer.tokens()));
  if (needs.last_queries > 1 || needs.last_share != 0) {
    Needs less = needs;
    less.last_queries = needs.last_queries > 1 ? needs.last_queries - 1 : 1;
    less.last_share = 0;
    less.norm_share = 0;
    expect_missed(layer.Show(less, layer.tokens()));
  }
  if (needs.norm_share != 0) {
    Needs less = needs;
    less.norm_share = 0;
    expect_missed(layer.Show(less, layer.tokens()));
  }
  // Extra observations do no harm.
  Needs more = needs;
  more.last_queries += 5;
  const auto asked = Decide(policy_, AllOf(layer), memory_);
  memory_ = before;
  const auto shown = Decide(policy_, layer.Show(more, layer.tokens()), memory_);
  ASSERT_TRUE(asked.ok() && shown.ok()) << asked.status() << shown.status();
  ExpectSame(*shown, *asked);
}

// If the device fails at any call, its error is returned and the policy remembers nothing.
TEST_P(PoliciesWithObservations, DeviceErrorsAreReported) {
  ObservedLayer layer = Layer(100);
  const LayerMemory before = memory_;
  for (std::uint64_t calls = 0;; ++calls) {
    const LayerView view = AllOf(layer);
    layer.scorer().FailAfter(calls);
    const absl::Status status = Decide(policy_, view, memory_).status();
    if (layer.scorer().calls() <= calls) {
      EXPECT_TRUE(status.ok()) << status;
      break;
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ExpectSame(memory_, before);
  }
}

TEST_P(PoliciesObservingWhileDecoding, KeysThatCannotBeLookedAtWhileDecodingAreTold) {
  ObservedLayer layer = Layer(100);
  layer.Apply(Decided(layer));
  const LayerMemory before = memory_;
  const std::vector<std::uint64_t> held = Counts(layer);
  layer.Grow(3);
  std::uint64_t calls = 0;
  for (;; ++calls) {
    const LayerView view = Shown(layer, layer.tokens() - 3);
    layer.scorer().FailAfter(calls);
    const absl::Status status = Advance(policy_, view, held, memory_).status();
    if (layer.scorer().calls() <= calls) {
      EXPECT_TRUE(status.ok()) << status;
      break;
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ExpectSame(memory_, before);
  }
  EXPECT_GE(calls, 3u);
}

TEST_P(PoliciesThatContinue, OneGoIsAsGoodAsTokenByToken) {
  for (int round = 0; round < 5; ++round) {
    ObservedLayer layer = Layer(random_.Between(1, 100));
    memory_ = {};
    layer.Apply(Decided(layer));
    // Both layers grow by the same tokens.
    ObservedLayer at_once = layer;
    ObservedLayer singly = layer;
    LayerMemory memory_at_once = memory_;
    LayerMemory memory_singly = memory_;
    const std::uint64_t more = random_.Between(1, 60);
    const auto decision = Advanced(at_once, more, memory_at_once);
    ASSERT_TRUE(decision.ok()) << decision.status();
    ExpectWellFormed(*decision, at_once);
    at_once.Apply(*decision);
    for (std::uint64_t i = 0; i < more; ++i) {
      const auto step = Advanced(singly, 1, memory_singly);
      ASSERT_TRUE(step.ok()) << step.status();
      singly.Apply(*step);
    }
    ExpectSame(memory_at_once, memory_singly);
    for (std::size_t lane = 0; lane < at_once.lanes().size(); ++lane) {
      std::vector<std::uint64_t> a;
      std::vector<std::uint64_t> b;
      for (const auto& entry : at_once.lanes()[lane]) a.push_back(entry.position);
      for (const auto& entry : singly.lanes()[lane]) b.push_back(entry.position);
      EXPECT_EQ(a, b);
      EXPECT_EQ(a.size(), std::min(promise_.entries, at_once.tokens()));
      for (std::uint64_t i = 0; i < std::min(promise_.sink, at_once.tokens()); ++i) {
        EXPECT_EQ(a[i], i);
      }
      for (std::uint64_t i = 1; i <= std::min(promise_.recent, at_once.tokens()); ++i) {
        EXPECT_EQ(a[a.size() - i], at_once.tokens() - i);
      }
    }
  }
}

TEST_P(PoliciesObservingWhileDecoding, QueriesThatAreMissingWhileDecodingAreMissed) {
  ObservedLayer layer = Layer(100);
  layer.Apply(Decided(layer));
  const LayerMemory before = memory_;
  const std::vector<std::uint64_t> held = Counts(layer);
  layer.Grow(3);
  // Only queries of the first of them.
  LayerView view = layer.Show(NeedsOf(policy_), layer.tokens() - 3);
  std::vector<HeadQueries> first(view.queries.begin(), view.queries.end());
  for (HeadQueries& head : first) head.positions = head.positions.first(1);
  view.queries = first;
  const absl::Status status = Advance(policy_, view, held, memory_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(AsStringView(status.message())), HasSubstr("at position 101"));
  ExpectSame(memory_, before);
}

// A sequence that is truncated loses its newest entries and can continue.
TEST_P(PoliciesThatContinue, AShorterSequenceGoesOn) {
  ObservedLayer layer = Layer(100);
  layer.Apply(Decided(layer));
  ObservedLayer shorter({.layer = 1}, operations(), random_);
  shorter.Grow(90);
  for (std::size_t lane = 0; lane < shorter.lanes().size(); ++lane) {
    std::erase_if(shorter.lanes()[lane], [&](const auto& entry) {
      return std::ranges::none_of(
          layer.lanes()[lane], [&](const auto& held) { return held.position == entry.position; });
    });
  }
  for (int step = 0; step < 3; ++step) {
    const auto decision = Advanced(shorter, 9, memory_);
    // Lanes may have become ragged if heads keep different tokens, but not if one decision covers
    // all.
    ASSERT_TRUE(decision.ok()) << decision.status();
    ExpectWellFormed(*decision, shorter);
    shorter.Apply(*decision);
    for (const auto& lane : shorter.lanes()) EXPECT_LE(lane.size(), promise_.entries);
  }
}

Needs NeedsOf(const Promise& promise) { return NeedsOf(Parsed(promise.text)); }

INSTANTIATE_TEST_SUITE_P(Rows, TokenPolicies,
                         testing::ValuesIn(SubjectsThat([](const Promise&) { return true; })),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Rows, PoliciesThatMergeOnce,
                         testing::ValuesIn(SubjectsThat([](const Promise& promise) {
                           return promise.same_again;
                         })),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Rows, PoliciesWithObservations,
                         testing::ValuesIn(SubjectsThat([](const Promise& promise) {
                           return NeedsOf(promise) != Needs{};
                         })),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Rows, PoliciesThatContinue,
                         testing::ValuesIn(SubjectsThat([](const Promise& promise) {
                           return Continues(Parsed(promise.text));
                         })),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Rows, PoliciesObservingWhileDecoding,
                         testing::ValuesIn(SubjectsThat([](const Promise& promise) {
                           return NeedsOf(promise).decode_queries;
                         })),
                         NameOf);

TEST(TokenPolicyRows, AllHavePromises) {
  std::set<std::string_view> promised;
  for (const Promise& promise : Promises()) promised.insert(promise.row);
  std::set<std::string_view> rows;
  for (const TermKind* kind : TermKinds()) {
    if (kind->tokens != nullptr) rows.insert(kind->name);
  }
  EXPECT_EQ(promised, rows);
}

}  // namespace
}  // namespace tessera::policies
