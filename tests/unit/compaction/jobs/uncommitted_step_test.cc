// Steps through gRPC: drafts are appended before the number of accepted ones is known. For any
// outcome, and whenever background jobs run, the sequence equals one without drafts.

#include "daemon/compaction/lanes/uncommitted_step.h"

#include <numeric>
#include <string>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using Positions = std::vector<std::uint64_t>;

class OpenSteps : public CompactorTest, public testing::WithParamInterface<const char*> {
 protected:
  OpenSteps() : CompactorTest(1 << 20, 96 << 20) {
    model_ = world_.Register(cache::SmallModel("steps", 2, 2));
  }
  Track Begin(const Stamps& prompt) {
    Track track = NewTrack(*policies::ParsePolicy(GetParam()));
    if (!prompt.empty()) AppendStamps(track, prompt);
    CompressAll(track);
    return track;
  }
  void CompressAll(Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  // Appends layer by layer with background jobs in between; `accepted` drafts are kept.
  void Step(Track& track, const Stamps& drafts, std::uint64_t accepted) {
    const std::uint64_t first = track.stamps.size();
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const Compactor::Rows rows = {.first_layer = layer,
                                    .layers = 1,
                                    .decoded = true,
                                    .first_token = first,
                                    .until = first + drafts.size()};
      const auto tokens =
          compactor_.Append(track.sequence, rows, DrawnRows(model_->layout(), drafts));
      ASSERT_TRUE(tokens.ok()) << tokens.status();
      if (random_.OneIn(3)) RunAll();
    }
    track.stamps.insert(track.stamps.end(), drafts.begin(), drafts.end());
    if (random_.OneIn(8)) OperatorCompresses(track);
    if (!random_.OneIn(4)) RunAll();
    if (accepted < drafts.size()) Truncate(track, first + accepted);
  }
  void OperatorCompresses(Track& track) {
    compactor_.Compress(track.sequence, {.layers = model_->layers(), .amid_steps = true},
                        [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
    RunAll();
  }
  Positions PositionsOf(const Track& track, std::uint32_t lane) {
    return track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes[lane].positions;
  }
  void ExpectAlike(const Track& a, const Track& b) {
    for (std::uint32_t lane = 0; lane < model_->lanes(); ++lane) {
      ASSERT_EQ(PositionsOf(a, lane), PositionsOf(b, lane)) << "lane " << lane;
    }
  }
};

TEST_P(OpenSteps, WhatIsTakenBackHasCostNothing) {
  for (int round = 0; round < 6; ++round) {
    const Stamps prompt = DrawTokens(random_.OneIn(3) ? 0 : random_.Between(1, 90), 1);
    Track drafting = Begin(prompt);
    Track plain = Begin(prompt);
    for (int step = 0; step < 40; ++step) {
      const Stamps drafts = DrawTokens(random_.Between(1, 9), 2);
      const std::uint64_t accepted = random_.OneIn(3) ? drafts.size() : random_.Below(3);
      const auto stay = static_cast<std::ptrdiff_t>(std::min(accepted, drafts.size()));
      Step(drafting, drafts, static_cast<std::uint64_t>(stay));
      DecodeByCalls(plain, {drafts.begin(), drafts.begin() + stay});
      if (HasFailure()) return;
      if (!random_.OneIn(10)) continue;
      CompressAll(drafting);
      CompressAll(plain);
      ExpectAlike(drafting, plain);
      // Continues from a truncated state, too.
      if (random_.OneIn(2) && plain.stamps.size() > 10) {
        Truncate(drafting, drafting.stamps.size() - 5);
        Truncate(plain, plain.stamps.size() - 5);
      }
    }
    CompressAll(drafting);
    CompressAll(plain);
    ExpectAlike(drafting, plain);
    drafting.sequence->Free();
    plain.sequence->Free();
  }
}

// Accepted drafts count when the next step begins after a full tile.
TEST_P(OpenSteps, WhatStaysIsCountedInTime) {
  Track track = Begin({});
  for (int step = 0; step < 60; ++step) {
    Step(track, DrawTokens(6, 1), 1 + random_.Below(6));
    RunAll();
    for (std::uint32_t lane = 0; lane < model_->lanes(); ++lane) {
      EXPECT_LE(PositionsOf(track, lane).size(), 44u + kernels::kTileEntries + 6)
          << "lane " << lane;
    }
  }
}

// Also if the policy is set while drafts are present on a sequence without one.
TEST_P(OpenSteps, APolicySetAmidAStepCountsNoDrafts) {
  for (const bool first : {false, true}) {
    Track drafting = NewTrack(*policies::ParsePolicy(first ? GetParam() : "dense"));
    Track plain = NewTrack(*policies::ParsePolicy(first ? GetParam() : "dense"));
    const Stamps tokens = DrawTokens(62, 1);
    const Stamps drafts = DrawTokens(8, 2);
    DecodeByCalls(drafting, tokens);
    DecodeByCalls(plain, tokens);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const Compactor::Rows rows = {
          .first_layer = layer, .layers = 1, .decoded = true, .first_token = 62, .until = 70};
      ASSERT_TRUE(
          compactor_.Append(drafting.sequence, rows, DrawnRows(model_->layout(), drafts)).ok());
    }
    drafting.stamps.insert(drafting.stamps.end(), drafts.begin(), drafts.end());
    for (Track* track : {&drafting, &plain}) {
      ASSERT_TRUE(compactor_.SetPolicy(*track->sequence, *policies::ParsePolicy(GetParam())).ok());
      OperatorCompresses(*track);
    }
    Truncate(drafting, 63);
    DecodeByCalls(plain, {drafts.front()});
    CompressAll(drafting);
    CompressAll(plain);
    ExpectAlike(drafting, plain);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, OpenSteps,
    testing::Values(
        "streaming:sink=0,recent=32", "streaming:sink=4,recent=40",
        "lacache:budget=32,span=1,overlap=0,sink=0", "streaming:sink=4,recent=40+quest",
        "streaming:sink=4,recent=40+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select=0"),
    [](const auto& instance) { return std::to_string(instance.index); });

TEST(UncommittedStep, EndsWithWhatComesBehindIt) {
  UncommittedStep step;
  EXPECT_EQ(step.FinalBefore(100), 100u) << "of a tail";
  step.Begin(100, 108);
  EXPECT_EQ(step.FinalBefore(108), 100u);
  EXPECT_EQ(step.FinalBefore(90), 90u) << "a layer that has not got it";
  EXPECT_EQ(step.FinalBefore(109), 109u) << "more has come behind it";
  step.CutTo(103);
  EXPECT_EQ(step.FinalBefore(103), 100u);
  EXPECT_TRUE(step.PreviousStepFilledTile()) << "it is the first";
  step.Begin(103, 111);
  EXPECT_EQ(step.FinalBefore(111), 103u);
  EXPECT_FALSE(step.PreviousStepFilledTile());
  step.Begin(128, 129);
  EXPECT_TRUE(step.PreviousStepFilledTile());
  step.Prompt(140);
  EXPECT_EQ(step.FinalBefore(140), 140u) << "a prompt is taken as it is";
  step.Begin(140, 141);
  EXPECT_FALSE(step.PreviousStepFilledTile());
  step.CutTo(50);
  EXPECT_EQ(step.FinalBefore(50), 50u);
  step.Begin(50, 58);
  EXPECT_EQ(step.FinalBefore(58), 50u);
}

}  // namespace
}  // namespace tessera::compaction
