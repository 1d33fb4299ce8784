// Setting a policy after another one has worked: it continues from what that left, or is refused at
// once. Also which state a sequence keeps when it adopts a published prefix.

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/policies/grammar/parse.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::HasSubstr;

constexpr char kPacked[] = "+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select=0";

class PolicyChanges : public CompactorTest {
 protected:
  PolicyChanges() : CompactorTest(4 << 20, 96 << 20) {
    model_ = world_.Register(cache::SmallModel("changes", 4, 2));
  }

  static policies::Policy Policy(const std::string& text) {
    absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *std::move(policy);
  }
  absl::Status Set(const Track& track, const std::string& text) {
    return compactor_.SetPolicy(*track.sequence, Policy(text));
  }
  std::vector<std::vector<std::uint64_t>> PositionsOf(const Track& track) {
    std::vector<std::vector<std::uint64_t>> positions;
    for (auto& lane : track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes) {
      positions.push_back(std::move(lane.positions));
    }
    return positions;
  }
  // Observes attention sums, and the keys of the newest tokens as their queries.
  void Show(const Track& track) {
    const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
    const policies::Needs needs = policies::NeedsOf(policy);
    const std::uint64_t tokens = track.stamps.size();
    const std::uint64_t count = needs.decode_queries
                                    ? tokens - Compactor::DecidedOf(*track.sequence)
                                    : std::min<std::uint64_t>(needs.last_queries, tokens);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(policy, layer) != layer) continue;
      const kernels::LayerGeometry geometry = model_->geometry(layer);
      const kernels::DenseTile tile = model_->layout().tile(layer);
      std::vector<std::byte> rows(count * geometry.query_heads * tile.row_bytes());
      for (std::uint64_t i = 0; i < count * geometry.query_heads; ++i) {
        const auto head = static_cast<std::uint32_t>(i % geometry.query_heads);
        DrawRow(track.stamps[tokens - count + i / geometry.query_heads],
                {layer, head / geometry.group(), cache::RowKind::kKey}, tile,
                rows.data() + i * tile.row_bytes());
      }
      std::vector<float> paid(model_->layout().kv_heads(layer) * tokens);
      std::iota(paid.begin(), paid.end(), 1.0f);
      ObservedLayer shown = {.layer = layer, .tokens = tokens};
      if (count > 0) shown.last = {tokens - count, count, rows.data()};
      if (needs.attention_sums) shown.sums = {0, tokens, paid.data()};
      if (count == 0 && !needs.attention_sums) continue;
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void CompressNow(const Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
};

// Nothing waits to be packed. The new budget applies at once, and packing starts with the next
// rows.
TEST_F(PolicyChanges, APolicyThatPacksFromNowOnKeepsItsBudgetAtOnce) {
  for (const char* next : {"streaming:sink=2,recent=80", "h2o:heavy=42,recent=40",
                           "lacache:budget=82,span=2,sink=2"}) {
    SCOPED_TRACE(next);
    Track track = NewTrack(Policy("streaming:sink=2,recent=100"));
    Append(track, 150, 1, /*end_of_prompt=*/true);
    CompressNow(track);
    ASSERT_EQ(PositionsOf(track)[0].size(), 102u);
    ASSERT_TRUE(Set(track, std::string(next) + kPacked).ok());
    for (int again = 0; again < 2; ++again) {
      if (again == 0) Show(track);
      CompressNow(track);
      for (const auto& lane : PositionsOf(track)) EXPECT_EQ(lane.size(), 82u);
    }
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// The queries behind the earlier decision are no longer available.
TEST_F(PolicyChanges, AnotherBudgetGoesOnFromWhatWasLearned) {
  for (const auto& [first, next] : {std::pair("h2o:heavy=20,recent=10", "h2o:heavy=12,recent=6"),
                                    std::pair("tova:budget=30", "tova:budget=18")}) {
    SCOPED_TRACE(next);
    Track track = NewTrack(Policy(first));
    Append(track, 100, 1, /*end_of_prompt=*/true);
    Show(track);
    CompressNow(track);
    for (const auto& lane : PositionsOf(track)) ASSERT_EQ(lane.size(), 30u);
    EXPECT_FALSE(track.sequence->has_manual_changes());
    ASSERT_TRUE(Set(track, next).ok());
    EXPECT_TRUE(track.sequence->has_manual_changes()) << "by its budget others would have gone";
    CompressNow(track);  // nothing new to observe
    Append(track, 5, 1, /*end_of_prompt=*/true);
    Show(track);
    CompressNow(track);
    for (const auto& lane : PositionsOf(track)) EXPECT_EQ(lane.size(), 18u);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// The remaining tokens were selected from more than themselves, which the policy would not do for
// the shorter prompt.
TEST_F(PolicyChanges, ACutBehindADecisionLeavesWhatItsPolicyWouldNot) {
  for (const char* text :
       {"snapkv:window=8,tokens=16", "h2o:heavy=10,recent=6", "tova:budget=16"}) {
    SCOPED_TRACE(text);
    Track track = NewTrack(Policy(text));
    Append(track, 100, 1, /*end_of_prompt=*/true);
    Show(track);
    CompressNow(track);
    Append(track, 20, 1);
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, 105).ok());
    EXPECT_FALSE(track.sequence->has_manual_changes()) << "nothing had been decided there";
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, 60).ok());
    EXPECT_TRUE(track.sequence->has_manual_changes());
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, 0).ok());
    EXPECT_FALSE(track.sequence->has_manual_changes()) << "of nothing nothing is left";
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// Nothing was evicted that a shorter prompt would have kept.
TEST_F(PolicyChanges, ACutOfWhatIsWithinItsBudgetLeavesWhatItsPolicyWould) {
  for (const char* text : {"snapkv:window=8,tokens=16", "tova:budget=16"}) {
    SCOPED_TRACE(text);
    Track track = NewTrack(Policy(text));
    Append(track, 12, 1, /*end_of_prompt=*/true);
    Show(track);
    CompressNow(track);
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, 5).ok());
    EXPECT_FALSE(track.sequence->has_manual_changes());
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// A fork has the tokens that all layers hold, and the first layer has selected from more.
TEST_F(PolicyChanges, AForkOfLayersThatAreAheadHoldsWhatItsPolicyWouldNot) {
  Track track = NewTrack(Policy("streaming:sink=2,recent=10"));
  Append(track, 50, 1);
  const auto longer = [&](std::uint32_t first, std::uint32_t layers) {
    const Compactor::Rows rows = {.first_layer = first,
                                  .layers = layers,
                                  .end_of_prompt = true,
                                  .first_token = 50,
                                  .until = 100};
    const Stamps stamps = DrawTokens(50, 1);
    ASSERT_TRUE(compactor_.Append(track.sequence, rows, DrawnRows(model_->layout(), stamps)).ok());
    compactor_.Compress(track.sequence, {first, layers, true},
                        [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
    RunAll();
  };
  longer(0, 1);
  ASSERT_EQ(PositionsOf(track)[0].size(), 12u);
  const Track fork = Fork(track);
  EXPECT_FALSE(track.sequence->has_manual_changes());
  EXPECT_TRUE(fork.sequence->has_manual_changes());
  longer(1, model_->layers() - 1);
  EXPECT_FALSE(Fork(track).sequence->has_manual_changes());
}

// One of a layer's lanes was sealed under the previous policy, and the other still waits.
TEST_F(PolicyChanges, LanesThatWereSealedApartAreDecidedAboutTogether) {
  for (const char* tail : {"", kPacked}) {
    for (const std::string& next :
         {std::string("chunkkv:chunk=4,window=4,budget=0.5"),
          std::string("semanticache:budget=0.8,sink=0,recent=4,max_chunk=16,delimiters=0,"
                      "scope=layer")}) {
      // Of all tokens, which are packed.
      if (*tail == '\0' && next.starts_with("semanticache")) continue;
      SCOPED_TRACE(next + tail);
      Track track = NewTrack(SmallMosaic());
      Append(track, 100, 1, /*end_of_prompt=*/true);
      scheduler_.RunNext();  // seals the first lane
      ASSERT_EQ(track.sequence->OpenEntries(0), 0u);
      ASSERT_EQ(track.sequence->OpenEntries(1), 100u);
      ASSERT_TRUE(Set(track, next + tail).ok());
      RunAll();
      for (int prompt = 1; prompt <= 3; ++prompt) {
        Append(track, 60, 1, /*end_of_prompt=*/true);
        Show(track);
        CompressNow(track);
        const auto positions = PositionsOf(track);
        EXPECT_EQ(positions[0], positions[1]);
        EXPECT_LT(positions[0].size(), track.stamps.size() - 5 * prompt);
        // All of the first prompt: the first lane has made no choice among it.
        EXPECT_EQ(positions[0][99], 99u);
      }
      ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    }
  }
}

TEST_F(PolicyChanges, WhatEveryCompressWouldRefuseIsRefusedAtOnce) {
  const auto refused = [&](const Track& track, const std::string& text, const char* why) {
    const absl::Status status = Set(track, text);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << text << ": " << status;
    EXPECT_THAT(std::string(AsStringView(status.message())), HasSubstr(why)) << text;
  };
  Track packed = NewTrack(SmallMosaic());
  Append(packed, 100, 1, /*end_of_prompt=*/true);
  RunAll();
  refused(packed, "semanticache:sink=2,recent=4,delimiters=0",
          "holds 100 packed entries in layer 0, kv head 0; set a policy that merges all of a lane "
          "before entries are packed");
  EXPECT_TRUE(Set(packed, "lacache:budget=82,span=2,sink=2").ok());

  // Each lane keeps the tokens of its own head.
  Track apart = NewTrack(Policy("snapkv:tokens=20,window=4"));
  Append(apart, 100, 1, /*end_of_prompt=*/true);
  Show(apart);
  CompressNow(apart);
  ASSERT_NE(PositionsOf(apart)[0], PositionsOf(apart)[1]);
  for (const char* next : {"tova:budget=10",
                           "semanticache:sink=2,recent=4,delimiters=0,"
                           "scope=layer"}) {
    refused(apart, next, "kv head 1 holds entries of other tokens than kv head 0");
  }
  EXPECT_TRUE(Set(apart, "lacache:budget=10,span=2,sink=2").ok()) << "which counts entries";
}

TEST_F(PolicyChanges, KeysOfLanesThatWereSealedApartAreNotCut) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, /*end_of_prompt=*/true);
  scheduler_.RunNext();  // seals the first lane
  const char* const cuts = "+think:ratio=0.5,window=4,recent_size=8";
  const absl::Status status = Set(track, std::string("chunkkv:chunk=4,window=4,budget=0.5") + cuts);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(AsStringView(status.message())),
              HasSubstr("0 entries of kv head 0 wait for a strategy, but 100 of kv head 1"));
  EXPECT_TRUE(Set(track, std::string("snapkv:tokens=20,window=4") + cuts).ok());
}

// The layer that decides was done under the previous policy; the others take over its entries.
TEST_F(PolicyChanges, LayersTakeOverWhatWasDecidedUnderThePolicyBefore) {
  Track track = NewTrack(Policy("streaming:sink=2,recent=40"));
  Append(track, 100, 1, /*end_of_prompt=*/true);
  scheduler_.RunNext();  // of the first layer
  ASSERT_EQ(PositionsOf(track)[0].size(), 42u);
  ASSERT_TRUE(Set(track, "chunkkv:chunk=4,window=4,budget=0.5,reuse=4").ok());
  RunAll();
  Show(track);
  CompressNow(track);
  for (const auto& lane : PositionsOf(track)) EXPECT_EQ(lane, PositionsOf(track)[0]);
}

// Adopts a prefix, as after publishing a duplicate, while its next prompt waits for a decision.
TEST_F(PolicyChanges, AdoptingAPrefixKeepsLaterObservations) {
  for (const char* text : {"streaming:sink=2,recent=1000", "h2o:heavy=500,recent=500"}) {
    SCOPED_TRACE(text);
    const Stamps head = DrawTokens(50, 1);
    Track one = NewTrack(Policy(text)), other = NewTrack(Policy(text));
    for (Track* track : {&one, &other}) {
      AppendStamps(*track, head, /*end_of_prompt=*/true);
      Show(*track);
      CompressNow(*track);
    }
    Append(other, 100, 2, /*end_of_prompt=*/true);
    Show(other);
    const auto told = Compress(other);
    ASSERT_TRUE(compactor_.AdoptPrefix(*other.sequence, *one.sequence).ok());
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(Compactor::DecidedOf(*other.sequence), 150u);
    const std::vector<policies::TokenSpan> prompts =
        ManagedSequence::Of(*other.sequence)->prompts();
    ASSERT_FALSE(prompts.empty());
    EXPECT_EQ(prompts.back().end, 150u);
  }
}

// The adopting sequence lacks the decisions about the adopted rows, so it takes them with the rows.
TEST_F(PolicyChanges, AdoptingAPrefixTakesItsDecisions) {
  const Stamps head = DrawTokens(100, 1);
  Track one = NewTrack(Policy("h2o:heavy=20,recent=20")),
        other = NewTrack(Policy("h2o:heavy=20,recent=20"));
  for (Track* track : {&one, &other}) {
    AppendStamps(*track, head, /*end_of_prompt=*/true);
    RunAll();
    Show(*track);
  }
  CompressNow(one);
  ASSERT_EQ(PositionsOf(one)[0].size(), 40u);
  ASSERT_TRUE(compactor_.AdoptPrefix(*other.sequence, *one.sequence).ok());
  EXPECT_EQ(PositionsOf(other), PositionsOf(one));
  EXPECT_EQ(Compactor::DecidedOf(*other.sequence), 100u);
  EXPECT_EQ(Used(pool::MemoryTag::kObservations), 0u) << "what was shown of it is used up";
  Append(other, 40, 2, /*end_of_prompt=*/true);
  Show(other);
  CompressNow(other);
  EXPECT_EQ(PositionsOf(other)[0].size(), 40u);
}

// In any order of the cut and the choice, the final policy has no memory of removed tokens.
TEST_F(PolicyChanges, ACutThatWaitsForAChoiceMeetsThePolicyThatWasSetMeanwhile) {
  CallbackClock clock;
  Compactor compactor({.scheduler = &scheduler_,
                       .logger = &logger_,
                       .clock = &clock,
                       .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  for (int round = 0; round < 50; ++round) {
    Track track = NewTrack(policies::Policy());
    ASSERT_TRUE(compactor.SetPolicy(*track.sequence, Policy("streaming:sink=2,recent=1000")).ok());
    const Stamps stamps = DrawTokens(300, 1);
    const Compactor::Rows rows = {.layers = model_->layers(), .first_token = 0, .until = 300};
    ASSERT_TRUE(compactor.Append(track.sequence, rows, DrawnRows(model_->layout(), stamps)).ok());
    std::thread sets, cuts;
    clock.After(1, [&] {
      sets = std::thread([&] {
        EXPECT_TRUE(compactor.SetPolicy(*track.sequence, Policy("snapkv:tokens=64,window=8")).ok());
      });
      cuts = std::thread([&] { EXPECT_TRUE(compactor.Truncate(*track.sequence, 100).ok()); });
    });
    compactor.Compress(track.sequence, {0, model_->layers(), true}, [](const absl::Status&) {});
    RunAll();
    sets.join();
    cuts.join();
    const std::vector<policies::TokenSpan> prompts =
        ManagedSequence::Of(*track.sequence)->prompts();
    ASSERT_EQ(prompts.size(), 1u);
    EXPECT_EQ(prompts.front().end, 100u);
    RunAll();
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

// Memory is updated together with the rows, so that tokens after the cut are never mistaken for
// removed ones.
TEST_F(PolicyChanges, ACutTellsBeforeAnybodySeesIt) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 150, 1);
  int told = 0;
  EXPECT_FALSE(track.sequence->Truncate(151, [&] { ++told; }).ok());
  EXPECT_EQ(told, 0);
  EXPECT_TRUE(track.sequence->Truncate(100, [&] { ++told; }).ok());
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace tessera::compaction
