// Handover: the worker that adopts a sequence continues under its policy, with everything that the
// previous worker has observed.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/e2e/prefix/prefix_lanes.h"

namespace tessera {
namespace {

class Handover : public Prefixes, public testing::WithParamInterface<const char*> {
 protected:
  void HandTo(client::Worker& worker, client::Sequence& sequence) {
    const client::SequenceId id = sequence.id();
    const std::uint64_t tokens = sequence.tokens();
    const std::uint64_t next = sequence.next_position();
    const std::string policy = sequence.policy();
    const client::PolicyNeeds needs = sequence.needs();
    const absl::Status given = sequence.Handover(worker.session_id());
    ASSERT_TRUE(given.ok()) << given;
    EXPECT_TRUE(absl::IsNotFound(sequence.Compress().status())) << "the handle is spent";
    auto taken = worker.Adopt(model_, id);
    ASSERT_TRUE(taken.ok()) << taken.status();
    sequence = *std::move(taken);
    EXPECT_EQ(sequence.tokens(), tokens);
    EXPECT_EQ(sequence.next_position(), next);
    EXPECT_EQ(sequence.policy(), policy);
    EXPECT_EQ(sequence.needs(), needs);
  }
  void DecodeBy(client::Worker& worker, client::Sequence& sequence, SyntheticSequence& truth,
                int tokens) {
    for (int i = 0; i < tokens; ++i) {
      truth.Grow(1);
      DecodeOne(worker, sequence, truth);
    }
  }
  // Expects the same entries in every lane of both sequences.
  void ExpectHoldsAlike(client::Sequence& sequence, client::Sequence& twin) {
    const v1::DescribeResponse held = Entries(sequence);
    const v1::DescribeResponse alike = Entries(twin);
    ASSERT_EQ(held.lane_size(), alike.lane_size());
    for (int lane = 0; lane < held.lane_size(); ++lane) {
      EXPECT_TRUE(std::ranges::equal(held.lane(lane).position(), alike.lane(lane).position()))
          << "lane " << lane;
    }
  }
};

TEST_P(Handover, WhoeverTakesItGoesOnUnderItsPolicy) {
  client::Sequence sequence = NewSequence(GetParam());
  client::Sequence twin = NewSequence(GetParam());
  const std::uint64_t seed = random_.Bits();
  SyntheticSequence truth(shape_, seed);
  SyntheticSequence twins(shape_, seed);
  Append(sequence, truth, 200);
  Append(twin, twins, 200);
  // Before any decision: the observations of the prompt are uploaded.
  HandTo(*remote_, sequence);
  Compress(sequence);
  Compress(twin);
  ExpectHoldsAlike(sequence, twin);
  // After the decision, in the middle of decoding, and again.
  DecodeBy(*remote_, sequence, truth, 41);
  HandTo(*mapped_, sequence);
  DecodeBy(*mapped_, sequence, truth, 45);
  HandTo(*remote_, sequence);
  DecodeBy(*remote_, sequence, truth, 7);
  Compress(sequence);
  EXPECT_EQ(sequence.tokens(), 293u);
  ExpectAttendsToWhatIsLeft(sequence, truth, 0.02);
}

// In the middle of a prompt: the decision uses both halves as if one worker had observed them.
TEST_P(Handover, WhoeverTakesItGoesOnWithThePrompt) {
  client::Sequence sequence = NewSequence(GetParam());
  client::Sequence twin = NewSequence(GetParam());
  const std::uint64_t seed = random_.Bits();
  SyntheticSequence truth(shape_, seed);
  SyntheticSequence twins(shape_, seed);
  Append(sequence, truth, 120);
  HandTo(*remote_, sequence);
  Append(sequence, truth, 40);
  HandTo(*mapped_, sequence);
  Append(sequence, truth, 40);
  Append(twin, twins, 200);
  Compress(sequence);
  Compress(twin);
  ExpectHoldsAlike(sequence, twin);
  HandTo(*remote_, sequence);
  DecodeBy(*remote_, sequence, truth, 40);
  ExpectAttendsToWhatIsLeft(sequence, truth, 0.02);
}

// Observations that no decision has used yet also belong to a fork, whose worker never had them.
using HandoverOfObservations = Handover;
TEST_F(HandoverOfObservations, AForkGoesOn) {
  for (const char* policy : {"tova:budget=40", "h2o:heavy=20,recent=20"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 100);
    Compress(sequence);
    DecodeBy(*mapped_, sequence, truth, 5);
    HandTo(*remote_, sequence);
    auto fork = sequence.Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    DecodeBy(*remote_, *fork, truth, 40);
    const auto compressed = fork->Compress();
    ASSERT_TRUE(compressed.ok()) << compressed.status();
    const v1::DescribeResponse held = Entries(*fork);
    for (const v1::LaneDescription& lane : held.lane()) EXPECT_EQ(lane.entries(), 40u);
  }
}

// ---- A prompt that was too short to compress and grows in another worker

// The strongest queries are those of the first tokens. The adopting worker knows them only as far
// as they were uploaded: as many as 4,200 tokens require.
class HandoverOfTheStrongest : public Handover {
 protected:
  static constexpr std::uint64_t kStrong = 60, kShort = 3000, kEnoughFor = 4200;
  static constexpr const char* kPolicy =
      "semantickv:sink=3500,keep_total=0.9,lambda=0.01,recent_ratio=0.001";

  void See(client::Sequence& sequence, const SyntheticSequence& truth, std::uint64_t first,
           std::uint64_t prompt_tokens = 0) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<std::uint16_t> queries;
      for (std::uint64_t token = first; token < truth.tokens(); ++token) {
        for (const std::uint16_t element : truth.Query(layer, token)) {
          const float times = token < kStrong ? 8 : 1;
          queries.push_back(kernels::FloatToBf16(times * kernels::Bf16ToFloat(element)));
        }
      }
      const absl::Status seen = sequence.Observe({.layer = layer,
                                                  .first_token = first,
                                                  .query = BytesOf(queries),
                                                  .prompt_tokens = prompt_tokens});
      ASSERT_TRUE(seen.ok()) << seen;
    }
  }
  // `known`: the announced length of the prompt, which limits the number of queries that are kept.
  void GrowTo(std::uint64_t tokens, client::Sequence& sequence, SyntheticSequence& truth,
              bool known = false) {
    const std::uint64_t first = truth.tokens();
    Append(sequence, truth, tokens - first, /*observe=*/false);
    See(sequence, truth, first, known ? tokens - first : 0);
  }
  // Expects the same decision as for a sequence without a handover, or no decision. The same holds
  // for a fork.
  void ExpectDecidedAsBySomebodyWhoSawAll(client::Sequence& sequence,
                                          const SyntheticSequence& truth) {
    client::Sequence twin = NewSequence(kPolicy);
    SyntheticSequence twins(shape_, seed_);
    GrowTo(truth.tokens(), twin, twins);
    Compress(twin);
    EXPECT_LT(Lane(Entries(twin), 0).position_size(), static_cast<int>(truth.tokens()));
    auto fork = sequence.Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    for (client::Sequence* each : {&sequence, &*fork}) {
      SCOPED_TRACE(each == &sequence ? "itself" : "its fork");
      const absl::Status decided = each->Compress().status();
      if (truth.tokens() > kEnoughFor) {
        EXPECT_TRUE(absl::IsFailedPrecondition(decided)) << decided;
        const std::string why(decided.message());
        EXPECT_THAT(why, HasSubstr("layer 0: "));
        EXPECT_THAT(why, HasSubstr(std::to_string(truth.tokens()) + " tokens"));
        EXPECT_THAT(why, HasSubstr(std::to_string(kEnoughFor) + " tokens"));
        EXPECT_THAT(why, HasSubstr("observe the tokens again from 0 on"));
        EXPECT_EQ(Lane(Entries(*each), 0).position_size(), static_cast<int>(truth.tokens()));
        See(*each, truth, 0);
        Compress(*each);
      } else {
        EXPECT_TRUE(decided.ok()) << decided;
      }
      ExpectHoldsAlike(*each, twin);
    }
  }

  const std::uint64_t seed_ = random_.Bits();
};

TEST_F(HandoverOfTheStrongest, WhatTheGiverLetGoIsMissed) {
  for (const std::uint64_t tokens : {kEnoughFor, kEnoughFor + 1}) {
    client::Sequence sequence = NewSequence(kPolicy);
    SyntheticSequence truth(shape_, seed_);
    GrowTo(kStrong, sequence, truth, /*known=*/true);
    GrowTo(kShort, sequence, truth, /*known=*/true);
    HandTo(*remote_, sequence);
    GrowTo(tokens, sequence, truth);
    ExpectDecidedAsBySomebodyWhoSawAll(sequence, truth);
  }
}

TEST_F(HandoverOfTheStrongest, AnyOfThoseBeforeMayHaveShownTooFew) {
  for (const std::uint64_t tokens : {kEnoughFor, kEnoughFor + 1}) {
    client::Sequence sequence = NewSequence(kPolicy);
    SyntheticSequence truth(shape_, seed_);
    GrowTo(kStrong, sequence, truth);
    Compress(sequence);
    HandTo(*remote_, sequence);
    GrowTo(kShort, sequence, truth);
    Compress(sequence);
    HandTo(*mapped_, sequence);
    GrowTo(tokens, sequence, truth);
    ExpectDecidedAsBySomebodyWhoSawAll(sequence, truth);
  }
}

TEST_F(HandoverOfTheStrongest, APublishedPrefixHasThemForWhoeverBeginsWithIt) {
  client::Sequence published = NewSequence(kPolicy);
  SyntheticSequence head(shape_, seed_);
  GrowTo(kStrong, published, head);
  Publish(published, Count(kStrong));
  for (const std::uint64_t tokens : {kEnoughFor, kEnoughFor + 1}) {
    client::Sequence sequence = Fork(*remote_, Match(*remote_, Count(kStrong + 1), kPolicy));
    SyntheticSequence truth = head;
    GrowTo(tokens, sequence, truth);
    ExpectDecidedAsBySomebodyWhoSawAll(sequence, truth);
  }
}

// After the adopting worker truncates part of what was observed, the rest is still known.
TEST_F(HandoverOfTheStrongest, WhatIsTakenBackLeavesTheRestKnown) {
  client::Sequence sequence = NewSequence(kPolicy);
  SyntheticSequence truth(shape_, seed_);
  GrowTo(kShort, sequence, truth);
  HandTo(*remote_, sequence);
  const absl::Status cut = sequence.Truncate(kShort - 500);
  ASSERT_TRUE(cut.ok()) << cut;
  truth.Truncate(kShort - 500);
  GrowTo(kEnoughFor, sequence, truth);
  ExpectDecidedAsBySomebodyWhoSawAll(sequence, truth);
}

// Another policy on the same prompt uses existing observations as far as they suffice. The error
// names what is missing.
TEST_F(HandoverOfTheStrongest, AnotherPolicyTakesThemAlong) {
  client::Sequence sequence = NewSequence(kPolicy);
  SyntheticSequence truth(shape_, seed_);
  GrowTo(kShort, sequence, truth);
  HandTo(*remote_, sequence);
  GrowTo(kEnoughFor, sequence, truth);
  const std::string alike = "semantickv:sink=2000,keep_total=0.7,lambda=0.01,recent_ratio=0.001";
  auto fork = sequence.Fork(alike);
  ASSERT_TRUE(fork.ok()) << fork.status();
  Compress(*fork);
  client::Sequence twin = NewSequence(alike);
  SyntheticSequence twins(shape_, seed_);
  GrowTo(kEnoughFor, twin, twins);
  Compress(twin);
  EXPECT_LT(Lane(Entries(twin), 0).position_size(), static_cast<int>(kEnoughFor));
  ExpectHoldsAlike(*fork, twin);

  auto more = sequence.Fork("semantickv:sink=2000,keep_total=0.7,lambda=0.02,recent_ratio=0.001");
  ASSERT_TRUE(more.ok()) << more.status();
  See(*more, truth, kShort);
  const absl::Status missed = more->Compress().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(missed)) << missed;
  EXPECT_THAT(std::string(missed.message()), HasSubstr("observe the tokens again from 0 on"));
  See(*more, truth, 0);
  Compress(*more);
}

// If the parent has no observations, a policy that needs more does not decide from the child's
// alone.
TEST_F(HandoverOfTheStrongest, WhatAParentHasSeenIsMissed) {
  client::Sequence sequence = NewSequence(kPolicy);
  SyntheticSequence truth(shape_, seed_);
  GrowTo(kShort, sequence, truth);
  auto fork = sequence.Fork("semantickv:sink=2000,keep_total=0.7,lambda=0.02,recent_ratio=0.001");
  ASSERT_TRUE(fork.ok()) << fork.status();
  GrowTo(kEnoughFor, *fork, truth);
  const absl::Status missed = fork->Compress().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(missed)) << missed;
  EXPECT_THAT(std::string(missed.message()), HasSubstr("tokens from 0 on have not been observed"));
  See(*fork, truth, 0);
  Compress(*fork);
}

// A waiting prompt is decided together with tokens decoded after it, by any worker.
TEST_F(HandoverOfTheStrongest, WhatIsDecodedBehindItCountsToo) {
  client::Sequence sequence = NewSequence(kPolicy);
  SyntheticSequence truth(shape_, seed_);
  GrowTo(kStrong - 20, sequence, truth);
  HandTo(*remote_, sequence);
  DecodeBy(*remote_, sequence, truth, 300);
  GrowTo(kEnoughFor, sequence, truth);
  client::Sequence twin = NewSequence(kPolicy);
  SyntheticSequence twins(shape_, seed_);
  GrowTo(kStrong - 20, twin, twins);
  DecodeBy(*mapped_, twin, twins, 300);
  GrowTo(kEnoughFor, twin, twins, /*known=*/true);
  Compress(sequence);
  Compress(twin);
  EXPECT_LT(Lane(Entries(twin), 0).position_size(), static_cast<int>(kEnoughFor));
  ExpectHoldsAlike(sequence, twin);
}

// Truncating a prompt leaves the answer before it, whose observations the previous worker has
// uploaded.
TEST_F(HandoverOfTheStrongest, APromptIsTakenBackByAnother) {
  for (const std::uint64_t tokens : {580u, 600u}) {
    SCOPED_TRACE(tokens);
    const std::string policy = "semantickv:sink=16,keep_total=0.4,lambda=0.02";
    client::Sequence sequence = NewSequence(policy);
    client::Sequence twin = NewSequence(policy);
    SyntheticSequence truth(shape_, seed_);
    SyntheticSequence twins(shape_, seed_);
    Append(sequence, truth, 300);
    Append(twin, twins, 300);
    Compress(sequence);
    Compress(twin);
    DecodeBy(*mapped_, sequence, truth, 300);
    DecodeBy(*mapped_, twin, twins, 360);
    Append(sequence, truth, 50);
    HandTo(*remote_, sequence);
    const absl::Status cut = sequence.Truncate(tokens);
    ASSERT_TRUE(cut.ok()) << cut;
    truth.Truncate(tokens);
    DecodeBy(*remote_, sequence, truth, static_cast<int>(660 - tokens));
    Compress(sequence);
    Compress(twin);
    EXPECT_LT(Lane(Entries(twin), 0).position_size(), 660);
    ExpectHoldsAlike(sequence, twin);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Handover,
                         testing::Values("dense", "snapkv:budget=0.5,window=8",
                                         "chunkkv:budget=0.7,chunk=4,window=8",
                                         "semantickv:keep_total=0.4,sink=4,lambda=0.2,mask=none",
                                         "streaming:sink=4,recent=100", "h2o:heavy=40,recent=40",
                                         "tova:budget=80"),
                         [](const auto& policy) {
                           const std::string text = policy.param;
                           return text.substr(0, text.find(':'));
                         });

}  // namespace
}  // namespace tessera
