// The ends of full chunks of text are remembered with the sequence: after cuts, in forks, under
// other policies, and in sequences that adopt a prefix.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/policies/grammar/parse.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::StartsWith;

// All keys of the first kv head are similar; those of the others are not.
class SplitRows final : public cache::MadeRows {
 public:
  SplitRows(const shm::LaneLayout& layout, std::uint64_t first) : MadeRows(layout), from_(first) {}
  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    std::fill_n(key, count * tile.row_bytes(), std::byte{0});
    std::fill_n(value, count * tile.row_bytes(), std::byte{0});
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t channel = kv_head == 0 ? 0 : (from_ + first + i) % tile.head_dim;
      SetElement(key + i * tile.row_bytes(), tile.type, static_cast<std::uint32_t>(channel), 1);
    }
  }

 private:
  const std::uint64_t from_;
};

class ChunkBoundaries : public CompactorTest {
 protected:
  ChunkBoundaries() : CompactorTest(4 << 20, 96 << 20) {}
  static policies::Policy Policy(const std::string& more) {
    absl::StatusOr<policies::Policy> policy =
        policies::ParsePolicy("semanticache:delimiters=0,max_chunk=8,sink=0," + more);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *std::move(policy);
  }
  // Appends a prompt with keys similar to each other and to those of every other prompt, and
  // compresses it.
  void Prompt(Track& track, std::uint64_t tokens) {
    AppendStamps(track, Stamps(tokens, kAlike));
    CompressNow(track);
  }
  // Compresses with this many bytes of free memory.
  absl::Status CompressIn(std::uint64_t room, const Track& track) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const std::uint64_t free = account.limit_bytes() - account.used_bytes();
    auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
    // Delays the freeing of evicted rows.
    std::optional<cache::Tenant::Reader> reader(world_.tenant());
    const auto told = Compress(track);
    RunAll();
    reader.reset();
    Collect();
    squeezed.Reset();
    return told->status;
  }
  void ShowNewest(const Track& track, std::uint64_t count) {
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const std::size_t row = model_->layout().tile(layer).row_bytes();
      const std::vector<std::byte> rows(count * model_->geometry(layer).query_heads * row);
      ObservedLayer shown = {.layer = layer, .tokens = track.stamps.size()};
      shown.last = {track.stamps.size() - count, count, rows.data()};
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void CompressNow(const Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  void SplitPrompt(Track& track, std::uint64_t tokens) {
    const std::uint64_t first = track.stamps.size();
    const auto held = compactor_.Append(
        track.sequence, {.layers = model_->layers(), .first_token = first, .until = first + tokens},
        SplitRows(model_->layout(), first));
    ASSERT_TRUE(held.ok()) << held.status();
    track.stamps.resize(first + tokens);
    CompressNow(track);
  }
  // "position*weight" of every entry; all lanes hold the same.
  std::string Held(const Track& track) {
    const std::vector<std::string> held = HeldByLane(track);
    EXPECT_THAT(held, Each(held.front()));
    return held.front();
  }
  std::vector<std::string> HeldByLane(const Track& track) {
    std::vector<std::string> held;
    for (const auto& lane : track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes) {
      std::string& text = held.emplace_back();
      for (std::size_t i = 0; i < lane.positions.size(); ++i) {
        text += (i == 0 ? "" : " ") + std::to_string(lane.positions[i]) + "*" +
                std::to_string(static_cast<int>(lane.weights[i]));
      }
    }
    return held;
  }
  static std::vector<policies::ChunkEnds> Known(const Track& track) {
    ManagedSequence::ManagedLayer& layer = ManagedSequence::Of(*track.sequence)->layer(0);
    MutexLock lock(layer.mutex);
    return layer.state.memory.boundaries;
  }

  static constexpr std::uint64_t kAlike = 1;
};

TEST_F(ChunkBoundaries, AFullChunkIsNeverGoneOnWith) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  Prompt(track, 20);
  EXPECT_EQ(Held(track), "0*8 8*8 16*4");
  Prompt(track, 20);
  EXPECT_EQ(Held(track), "0*8 8*8 16*11 27*8 35*5");
  CompressNow(track);
  EXPECT_EQ(Held(track), "0*8 8*8 16*11 27*8 35*5");
  EXPECT_THAT(Known(track), Each(ElementsAre(8, 16, 27, 35)));
}

// Budgets count tokens. The last entry may also stand for tokens after it, and another policy may
// have dropped some.
TEST_F(ChunkBoundaries, ABudgetThatHasBeenMetIsMet) {
  Track track = NewTrack(Policy("budget=0.2,recent=0"));
  Prompt(track, 16);
  EXPECT_EQ(Held(track), "0*8 8*8");
  CompressNow(track);
  Prompt(track, 24);
  ASSERT_TRUE(
      compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy("streaming:sink=1,recent=1"))
          .ok());
  CompressNow(track);
  for (const char* budget : {"budget=0.15,recent=0", "budget=0.05,recent=0"}) {
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy(budget)).ok());
    CompressNow(track);
    EXPECT_EQ(Held(track), "0*8 32*8");
    EXPECT_EQ(Compactor::DecidedOf(*track.sequence), 40u);
  }
}

// Decoded tokens count, too. Their chunk is left alone until it is full.
TEST_F(ChunkBoundaries, DecodedTokensFillAChunk) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  Prompt(track, 20);
  DecodeByCalls(track, Stamps(9, kAlike));
  CompressNow(track);
  EXPECT_EQ(Held(track), "0*8 8*8 16*11 27*1 28*1");
}

TEST_F(ChunkBoundaries, AForkGoesOnFromThem) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  Prompt(track, 20);
  Track fork = Fork(track);
  Prompt(fork, 20);
  EXPECT_EQ(Held(fork), "0*8 8*8 16*11 27*8 35*5");
  EXPECT_THAT(Known(track), Each(ElementsAre(8, 16)));
  Prompt(track, 3);
  EXPECT_EQ(Held(track), "0*8 8*8 16*7");
  // No chunk has ended since, so it has the same entries as the other forks.
  Track another = Fork(track);
  CompressNow(another);
  for (std::size_t lane = 0; lane < model_->layout().kv_heads(0); ++lane) {
    EXPECT_TRUE(Known(another)[lane].Shares(Known(track)[lane]));
  }
}

TEST_F(ChunkBoundaries, ACutForgetsThoseBehindIt) {
  Track track = NewTrack(Policy("tau=0.5,recent=8"));
  Prompt(track, 20);
  const std::string newest = " 12*1 13*1 14*1 15*1 16*1 17*1 18*1 19*1";
  ASSERT_EQ(Held(track), "0*8 8*4" + newest);
  ASSERT_THAT(Known(track), Each(ElementsAre(8, 16)));
  Track fork = Fork(track);
  Truncate(track, 14);
  EXPECT_THAT(Known(track), Each(ElementsAre(8)));
  Prompt(track, 20);
  EXPECT_EQ(Held(track), "0*8 8*11 19*7 26*1 27*1 28*1 29*1 30*1 31*1 32*1 33*1");
  // An end exactly at the cut remains: the chunk before it is complete.
  Truncate(fork, 16);
  EXPECT_THAT(Known(fork), Each(ElementsAre(8, 16)));
  Prompt(fork, 12);
  EXPECT_EQ(Held(fork), "0*8 8*8 16*4 20*1 21*1 22*1 23*1 24*1 25*1 26*1 27*1");
  Truncate(fork, 0);
  for (const auto& of_lane : Known(fork)) EXPECT_TRUE(of_lane.empty());
  Prompt(fork, 12);
  EXPECT_EQ(Held(fork), "0*4 4*1 5*1 6*1 7*1 8*1 9*1 10*1 11*1");
}

TEST_F(ChunkBoundaries, AnotherPolicyKeepsToThem) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  Prompt(track, 20);
  for (const char* more : {"tau=0.4,recent=0", "tau=0.4,recent=0,scope=layer"}) {
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy(more)).ok());
    CompressNow(track);
    EXPECT_EQ(Held(track), "0*8 8*8 16*4");
  }
  // It is cut before its first decision.
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("tau=0.3,recent=0")).ok());
  Truncate(track, 20);
  Prompt(track, 20);
  EXPECT_EQ(Held(track), "0*8 8*8 16*11 27*8 35*5");
}

// Ends are facts about the lanes, independent of the policy that found them.
TEST_F(ChunkBoundaries, APolicyThatChoosesNothingKeepsThemToo) {
  for (const char* between :
       {"dense", "quest:page=4,tokens=64,dense_layers=0", "select", "snapkv:tokens=100"}) {
    SCOPED_TRACE(between);
    Track track = NewTrack(Policy("tau=0.5,recent=0"));
    Prompt(track, 20);
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy(between)).ok());
    Track fork = Fork(track);
    AppendStamps(fork, Stamps(4, kAlike));
    Truncate(fork, 20);
    for (const Track& each : {track, fork}) {
      EXPECT_EQ(Compactor::PolicyOf(*each.sequence).text, policies::ParsePolicy(between)->text);
      ASSERT_TRUE(compactor_.SetPolicy(*each.sequence, Policy("tau=0.5,recent=0")).ok());
      CompressNow(each);
      EXPECT_EQ(Held(each), "0*8 8*8 16*4");
    }
  }
}

// Both sequences are dense. One knows where chunks have ended, although nothing was merged.
TEST_F(ChunkBoundaries, ADenseSequenceTakesTheHeadOfAnother) {
  Track plain = NewTrack({});
  Track known = NewTrack(Policy("tau=1,recent=0"));
  for (Track* each : {&plain, &known}) AppendStamps(*each, Stamps(20, kAlike));
  CompressNow(known);
  ASSERT_TRUE(compactor_.SetPolicy(*known.sequence, {}).ok());
  ASSERT_THAT(Known(known), Each(ElementsAre(8, 16)));
  ASSERT_EQ(ManagedSequence::Of(*plain.sequence), nullptr);
  EXPECT_TRUE(compactor_.AdoptPrefix(*plain.sequence, *known.sequence).ok());
  EXPECT_TRUE(compactor_.AdoptPrefix(*known.sequence, *plain.sequence).ok());
  EXPECT_THAT(Known(known), Each(ElementsAre(8, 16)));
}

// One lane has only settled entries, in the other all entries wait. Ends between settled entries
// are kept.
TEST_F(ChunkBoundaries, WhatIsOutOfSightKeepsItsEnds) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  SplitPrompt(track, 32);
  ASSERT_EQ(HeldByLane(track)[0], "0*8 8*8 16*8 24*8");
  const std::string both =
      "snapkv:tokens=100,window=1+semanticache:tau=0.5,delimiters=0,max_chunk=8,sink=0,recent=0";
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy(both)).ok());
  SplitPrompt(track, 12);
  EXPECT_EQ(HeldByLane(track)[0], "0*8 8*8 16*8 24*8 32*8 40*4");
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("tau=0.5,recent=0")).ok());
  CompressNow(track);
  EXPECT_EQ(HeldByLane(track)[0], "0*8 8*8 16*8 24*8 32*8 40*4");
}

// Ends are dropped once they no longer separate remaining entries, whether or not the next decision
// sees those.
TEST_F(ChunkBoundaries, ThoseOfEntriesThatOthersHaveDroppedGo) {
  for (const char* next : {"", "snapkv:tokens=100,window=1+"}) {
    SCOPED_TRACE(next);
    Track track = NewTrack(Policy("tau=0.5,recent=0"));
    Prompt(track, 400);
    ASSERT_THAT(Known(track), Each(testing::SizeIs(50)));
    ASSERT_TRUE(
        compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy("streaming:sink=2,recent=3"))
            .ok());
    CompressNow(track);
    ASSERT_EQ(Held(track), "0*8 8*8 376*8 384*8 392*8");
    const std::string more = "semanticache:tau=0.5,delimiters=0,max_chunk=8,sink=0,recent=0";
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy(next + more)).ok());
    Prompt(track, 20);
    EXPECT_EQ(Held(track), "0*8 8*8 376*8 384*8 392*8 400*8 408*8 416*4");
    EXPECT_THAT(Known(track), Each(ElementsAre(8, 16, 384, 392, 400, 408, 416)));
  }
}

// The first of a layer's two lanes uses up the memory. The other one keeps its entries and its
// ends.
TEST_F(ChunkBoundaries, ALaneThatAChoiceHasNotComeToKeepsItsOwn) {
  int between = 0;
  for (std::uint64_t room = 1024; room < 400'000; room += 1024) {
    SCOPED_TRACE(room);
    Track track = NewTrack(Policy("tau=1,recent=0"));
    Prompt(track, 40);
    ASSERT_THAT(Known(track), Each(ElementsAre(8, 16, 24, 32, 40)));
    ASSERT_TRUE(
        compactor_
            .SetPolicy(*track.sequence,
                       *policies::ParsePolicy("snapkv:tokens=6,window=2+semanticache:"
                                              "tau=1,delimiters=0,max_chunk=8,sink=0,recent=0"))
            .ok());
    ShowNewest(track, 2);
    const absl::Status status = CompressIn(room, track);
    const std::vector<std::string> held = HeldByLane(track);
    ASSERT_TRUE(
        compactor_
            .SetPolicy(*track.sequence, *policies::ParsePolicy("semanticache:tau=0.5,delimiters=0,"
                                                               "max_chunk=64,sink=0,recent=0"))
            .ok());
    CompressNow(track);
    for (std::size_t lane = 0; lane < held.size(); ++lane) {
      if (std::ranges::count(held[lane], '*') == 6) continue;
      between += lane % 2 == 1 && held[lane - 1] != held[lane] ? 1 : 0;
      EXPECT_EQ(HeldByLane(track)[lane], "0*8 8*8 16*8 24*8 32*8");
    }
    track.sequence->Free();
    Collect();
    if (status.ok()) break;
  }
  EXPECT_GT(between, 0);
}

// The choice no longer fits and is recomputed. The ends found in the first lane are already known.
TEST_F(ChunkBoundaries, ALaneThatADroppedChoiceCameToKeepsThem) {
  int between = 0;
  for (std::uint64_t room = 1024; room < 400'000; room += 1024) {
    SCOPED_TRACE(room);
    Track track = NewTrack(Policy("tau=0.5,recent=8"));
    AppendStamps(track, Stamps(40, kAlike));
    const absl::Status status = CompressIn(room, track);
    const std::vector<std::string> held = HeldByLane(track);
    for (std::size_t lane = 1; lane < held.size(); lane += 2) {
      between += held[lane - 1] != held[lane] ? 1 : 0;
    }
    TruncateInsideJob(track, 39);
    CompressNow(track);
    EXPECT_THAT(HeldByLane(track), Each(StartsWith("0*8 8*8 16*8 24*")));
    track.sequence->Free();
    Collect();
    if (status.ok()) break;
  }
  EXPECT_GT(between, 0);
}

TEST_F(ChunkBoundaries, AdoptingAPrefixTakesItsBoundaries) {
  Track track = NewTrack(Policy("tau=0.5,recent=0"));
  Track other = NewTrack(Policy("tau=0.5,recent=0"));
  AppendStamps(other, Stamps(20, kAlike));
  Prompt(track, 20);
  ASSERT_TRUE(compactor_.AdoptPrefix(*other.sequence, *track.sequence).ok());
  EXPECT_EQ(Held(other), "0*8 8*8 16*4");
  Prompt(other, 20);
  EXPECT_EQ(Held(other), "0*8 8*8 16*11 27*8 35*5");
}

}  // namespace
}  // namespace tessera::compaction
