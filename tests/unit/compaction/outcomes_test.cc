// What is told of lanes that stay dense, and that a call without anything new changes nothing.

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/least_tokens.h"
#include "daemon/policies/registry.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/tokens/counts.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

class Outcomes : public CompactorTest {
 protected:
  Outcomes() : CompactorTest(4 << 20, 96 << 20) {
    cache::ModelSpec spec = cache::SmallModel("outcomes", 4, 2);
    spec.delimiter_token_ids = {7};
    model_ = world_.Register(spec);
  }
  static policies::Policy Policy(const std::string& text) {
    absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *std::move(policy);
  }
  std::vector<LaneOutcome> OutcomesOf(const Track& track) {
    return Compactor::OutcomesOf(*track.sequence, track.sequence->Describe(true).lanes);
  }
  // Of the first lane, which the others must be like.
  LaneOutcome OutcomeOf(const Track& track) {
    const std::vector<LaneOutcome> outcomes = OutcomesOf(track);
    for (const LaneOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.form, outcomes.front().form) << TextOf(outcome);
      EXPECT_EQ(outcome.dense.reason, outcomes.front().dense.reason) << TextOf(outcome);
    }
    return outcomes.front();
  }
  std::string TextFor(const Track& track) { return TextOf(OutcomeOf(track)); }
  std::uint64_t Counted(DenseReason reason) {
    return counters().left_dense[static_cast<std::size_t>(reason)];
  }
  absl::Status CompressNow(const Track& track) {
    const auto told = Compress(track);
    RunAll();
    EXPECT_EQ(told->times, 1);
    return told->status;
  }
  // All that the policy may ask for: the keys of all tokens, as their queries.
  void ShowAll(const Track& track) {
    const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
    const policies::Needs needs = policies::NeedsOf(policy);
    const std::uint64_t tokens = track.stamps.size();
    if (needs.token_ids) {
      std::vector<std::uint32_t> ids(tokens);
      for (std::uint64_t i = 0; i < tokens; ++i) ids[i] = i % 40 == 39 ? 7 : 1;
      ASSERT_TRUE(compactor_.ObserveTokens(*track.sequence, 0, ids).ok());
    }
    std::vector<float> paid(2 * tokens);
    std::iota(paid.begin(), paid.end(), 1.0f);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(policy, layer) != layer) continue;
      const kernels::LayerGeometry geometry = model_->geometry(layer);
      const std::uint64_t last = std::min<std::uint64_t>(
          tokens,
          std::max<std::uint64_t>(needs.last_queries, kernels::CountUp(needs.last_share * tokens)));
      const std::uint64_t strongest = kernels::CountUp(needs.norm_share * tokens);
      const auto by_token = Queries(track, layer, tokens - last, last, /*by_head=*/false);
      const auto by_head = Queries(track, layer, 0, strongest, /*by_head=*/true);
      std::vector<std::uint64_t> positions;
      for (std::uint32_t head = 0; head < geometry.query_heads; ++head) {
        for (std::uint64_t i = 0; i < strongest; ++i) positions.push_back(i);
      }
      ObservedLayer shown = {.layer = layer, .tokens = tokens};
      if (last > 0) shown.last = {tokens - last, last, by_token.data()};
      if (strongest > 0) {
        shown.norm = {.count = strongest, .positions = positions, .rows = by_head.data()};
      }
      if (needs.attention_sums) shown.sums = {0, tokens, paid.data()};
      const bool asks = shown.last.count + shown.norm.count + shown.sums.count > 0;
      const absl::Status status =
          asks ? compactor_.Observe(*track.sequence, shown) : absl::OkStatus();
      ASSERT_TRUE(status.ok()) << policy.text << ": " << status;
    }
  }
  // Of `count` tokens from `first` on.
  std::vector<std::byte> Queries(const Track& track, std::uint32_t layer, std::uint64_t first,
                                 std::uint64_t count, bool by_head) {
    const kernels::LayerGeometry geometry = model_->geometry(layer);
    const kernels::DenseTile tile = model_->layout().tile(layer);
    std::vector<std::byte> rows(count * geometry.query_heads * tile.row_bytes());
    for (std::uint64_t token = 0; token < count; ++token) {
      for (std::uint32_t head = 0; head < geometry.query_heads; ++head) {
        const std::uint64_t at =
            by_head ? head * count + token : token * geometry.query_heads + head;
        DrawRow(track.stamps[first + token], {layer, head / geometry.group(), cache::RowKind::kKey},
                tile, rows.data() + at * tile.row_bytes());
      }
    }
    return rows;
  }
  // All that a reader could tell apart: forms, positions, weights of every lane.
  std::string Held(const Track& track) {
    std::string held;
    const auto description = track.sequence->Describe(cache::Sequence::Detail::kEntries);
    for (const cache::Sequence::LaneDescription& lane : description.lanes) {
      held += std::to_string(lane.entries) + " of " + std::to_string(lane.tokens) + ":";
      for (const std::uint64_t position : lane.positions) held += " " + std::to_string(position);
      for (const float weight : lane.weights) held += " *" + std::to_string(weight);
      for (const cache::SegmentRun& run : lane.runs) {
        held += " [" + std::to_string(run.shape.key.kept) + " x " + std::to_string(run.entries) +
                " in " + std::to_string(run.segments) + "]";
      }
      held += "\n";
    }
    return held;
  }
};

// ---- why lanes stay dense

TEST_F(Outcomes, ShortEndsSayWhatTheyWouldLose) {
  policies::Policy policy =
      Policy("mosaickv:keep=0.03125,group=1,min_segment=1024,sinks=0,recent=0,select=0");
  Track track = NewTrack(policy);
  Append(track, 700, 1, /*end_of_prompt=*/true);
  RunAll();
  const LaneOutcome outcome = OutcomeOf(track);
  ASSERT_EQ(outcome.form, LaneForm::kDense);
  ASSERT_EQ(outcome.dense.reason, DenseReason::kLossAboveLimit) << TextOf(outcome);
  EXPECT_GT(outcome.dense.loss, outcome.dense.limit);
  EXPECT_EQ(outcome.dense.more_tokens(), 324u);
  EXPECT_EQ(outcome.dense_entries, 700u);
  EXPECT_THAT(TextOf(outcome), StartsWith("left dense: loss of "));
  EXPECT_THAT(TextOf(outcome), HasSubstr("is above loss_"));
  EXPECT_THAT(TextOf(outcome), HasSubstr("(segment of 700 tokens, shorter than min_segment 1024)"));
  EXPECT_EQ(Counted(DenseReason::kLossAboveLimit), model_->lanes());
  // With the tokens that it takes it is packed, whatever that loses.
  Append(track, 324, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(OutcomeOf(track).form, LaneForm::kCompressed);
  EXPECT_EQ(TextFor(track), "compressed: 1024 tokens");
}

TEST_F(Outcomes, ShortEndsSayWhatTheirRotationsTake) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;
  Track track = NewTrack(policy);
  Append(track, 40, 1, /*end_of_prompt=*/true);
  RunAll();
  const LaneOutcome outcome = OutcomeOf(track);
  ASSERT_EQ(outcome.dense.reason, DenseReason::kSegmentOverhead) << TextOf(outcome);
  const std::uint64_t more = outcome.dense.more_tokens();
  ASSERT_GT(more, 0u);
  EXPECT_THAT(
      TextOf(outcome),
      HasSubstr("a segment of 40 tokens with its rotations would be larger than dense rows"));
  EXPECT_THAT(TextOf(outcome), HasSubstr(std::to_string(more) + " more tokens are needed"));
  // As many as that, and it pays.
  Append(track, more, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(OutcomeOf(track).form, LaneForm::kCompressed) << TextFor(track);
}

TEST_F(Outcomes, WhatHasNotEndedWaits) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 40, 1);
  RunAll();
  const LaneOutcome outcome = OutcomeOf(track);
  EXPECT_EQ(outcome.form, LaneForm::kDense);
  EXPECT_EQ(outcome.dense.reason, DenseReason::kWaiting);
  EXPECT_EQ(TextOf(outcome),
            "left dense: waiting for the end of a prompt, or for enough tokens; 24 more tokens are "
            "needed");
  // That the prompt has ended may be said without rows, of all layers at once.
  Append(track, 160, 1);
  ASSERT_TRUE(compactor_.EndPrompt(track.sequence, 0, model_->layers()).ok());
  RunAll();
  EXPECT_EQ(OutcomeOf(track).form, LaneForm::kCompressed) << TextFor(track);
  Append(track, 40, 1);
  const LaneOutcome partly = OutcomeOf(track);
  EXPECT_EQ(partly.form, LaneForm::kPartly);
  EXPECT_EQ(partly.dense_entries, 40u);
  EXPECT_THAT(TextOf(partly), StartsWith("40 of 240 entries left dense: waiting"));
}

TEST_F(Outcomes, APolicyThatKeepsRowsSaysSo) {
  Track track = NewTrack(Policy("dense"));
  Append(track, 40, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(OutcomeOf(track).dense.reason, DenseReason::kPolicyDense);
  EXPECT_EQ(TextFor(track), "left dense: the policy does not compress this lane");
}

TEST_F(Outcomes, ACutForgetsWhatWasSaidOfTheRowsThatGo) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 256;
  Track track = NewTrack(policy);
  Append(track, 40, 1, /*end_of_prompt=*/true);
  RunAll();
  ASSERT_EQ(OutcomeOf(track).dense.reason, DenseReason::kSegmentOverhead);
  const Track fork = Fork(track);
  EXPECT_EQ(OutcomeOf(fork).dense.reason, DenseReason::kSegmentOverhead);
  Truncate(track, 0);
  Append(track, 40, 1);
  EXPECT_EQ(OutcomeOf(track).dense.reason, DenseReason::kWaiting);
}

TEST_F(Outcomes, APromptThatIsTooShortForItsPolicySaysHowManyTokensItTakes) {
  Track window = NewTrack(Policy("snapkv:window=8"));
  Append(window, 8, 1);
  ShowAll(window);
  EXPECT_TRUE(CompressNow(window).ok());
  EXPECT_EQ(TextFor(window),
            "left dense: 8 tokens are too few for the policy; 1 more token is needed");
  // More than the window, and a share that is less than it.
  Track share = NewTrack(Policy("snapkv:window=8,budget=0.2"));
  Append(share, 30, 1);
  ShowAll(share);
  EXPECT_TRUE(policies::LeavesWhole(CompressNow(share)));
  EXPECT_EQ(TextFor(share),
            "left dense: 30 tokens are too few for the policy; 10 more tokens are needed");
  Append(share, 10, 1);
  ShowAll(share);
  EXPECT_TRUE(CompressNow(share).ok());
  EXPECT_EQ(TextFor(share), "keeps 8 entries of 40 tokens");

  Track going_on = NewTrack(Policy("streaming:sink=2,recent=40"));
  Append(going_on, 30, 1);
  EXPECT_TRUE(CompressNow(going_on).ok());
  EXPECT_THAT(TextFor(going_on), HasSubstr("13 more tokens are needed"));
  EXPECT_GT(Counted(DenseReason::kTooShort), 0u);

  // The first and the newest tokens alone are more than the budget.
  Track pinned = NewTrack(Policy("semanticache:budget=0.2,sink=4,recent=16,delimiters=0"));
  Append(pinned, 50, 1);
  EXPECT_TRUE(policies::LeavesWhole(CompressNow(pinned)));
  EXPECT_THAT(TextFor(pinned), HasSubstr("50 more tokens are needed"));
}

TEST_F(Outcomes, WhatWasNotShownIsNamed) {
  Track track = NewTrack(Policy("snapkv:window=8"));
  Append(track, 100, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(OutcomeOf(track).dense.reason, DenseReason::kNotObserved);
  EXPECT_THAT(TextFor(track), HasSubstr("have not been observed")) << TextFor(track);
  EXPECT_EQ(Counted(DenseReason::kNotObserved), model_->lanes());
}

TEST_F(Outcomes, AChoiceThatIsTooSmallToBePackedSaysSo) {
  Track track = NewTrack(Policy("chunkkv:budget=0.2,window=8+mosaickv:keep=0.25,select=0"));
  Append(track, 100, 1);
  ShowAll(track);
  EXPECT_TRUE(CompressNow(track).ok());
  const LaneOutcome outcome = OutcomeOf(track);
  EXPECT_EQ(outcome.form, LaneForm::kPartly);
  EXPECT_TRUE(outcome.dense.reason == DenseReason::kSegmentOverhead ||
              outcome.dense.reason == DenseReason::kLossAboveLimit);
  EXPECT_THAT(TextOf(outcome), StartsWith("keeps 20 entries of 100 tokens; left dense: "));
}

// ---- nothing new

// Every token policy of the registry by itself, with packing, and with block summaries.
TEST_F(Outcomes, ACallWithoutAnythingNewChangesNothing) {
  const auto options = [](std::string_view name) -> std::string {
    if (name == "chunkkv" || name == "snapkv" || name == "pyramidkv") {
      return ":budget=0.4,window=8";
    }
    if (name == "semantickv") return ":sink=4,keep_total=0.4";
    if (name == "semanticache") return ":tau=0.2,sink=2,recent=4";
    if (name == "lacache") return ":budget=60";
    if (name == "streaming") return ":sink=4,recent=60";
    if (name == "h2o") return ":heavy=30,recent=30";
    if (name == "tova") return ":budget=60";
    return "";
  };
  int systems = 0;
  for (const policies::TermKind* kind : policies::TermKinds()) {
    if (kind->tokens == nullptr) continue;
    ++systems;
    for (const char* beside : {"", "+mosaickv:min_segment=32,segment=64,select=0", "+quest"}) {
      const std::string text = std::string(kind->name) + options(kind->name) + beside;
      SCOPED_TRACE(text);
      Track track = NewTrack(Policy(text));
      Append(track, 200, 1);
      ShowAll(track);
      ASSERT_TRUE(CompressNow(track).ok());
      const std::string held = Held(track);
      for (const LaneOutcome& outcome : OutcomesOf(track)) {
        EXPECT_NE(outcome.form, LaneForm::kDense) << TextOf(outcome);
      }
      const std::uint64_t packed = counters().segments_sealed;
      for (int again = 0; again < 3; ++again) {
        const absl::Status status = CompressNow(track);
        EXPECT_TRUE(status.ok()) << status;
        ASSERT_EQ(Held(track), held);
      }
      EXPECT_EQ(counters().segments_sealed, packed);
      track.sequence->Free();
      RunAll();
    }
  }
  EXPECT_EQ(systems, 9);
}

// What has been clustered stays as it is when more comes, but for the chunk that goes on.
TEST_F(Outcomes, WhatHasBeenMergedIsNotMergedAgainWhenMoreComes) {
  Track track = NewTrack(Policy("semanticache:tau=0.2,sink=0,recent=0,max_chunk=64"));
  Append(track, 400, 1);
  ShowAll(track);
  ASSERT_TRUE(CompressNow(track).ok());
  const auto of = [&] { return track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes; };
  const auto before = of();
  Append(track, 40, 1);
  ShowAll(track);
  ASSERT_TRUE(CompressNow(track).ok());
  const auto after = of();
  for (std::size_t lane = 0; lane < before.size(); ++lane) {
    ASSERT_LT(before[lane].entries, 400u);
    ASSERT_GT(after[lane].entries, before[lane].entries);
    EXPECT_TRUE(std::equal(before[lane].positions.begin(), before[lane].positions.end(),
                           after[lane].positions.begin()));
    EXPECT_TRUE(std::equal(before[lane].weights.begin(), before[lane].weights.end(),
                           after[lane].weights.begin()));
  }
}

}  // namespace
}  // namespace tessera::compaction
