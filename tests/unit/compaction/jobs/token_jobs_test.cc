// What may happen between a choice of tokens and its execution, and afterwards.

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/lanes/element.h"
#include "daemon/policies/grammar/parse.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using Positions = std::vector<std::uint64_t>;

class TokenJobs : public CompactorTest {
 protected:
  TokenJobs() : CompactorTest(0, 96 << 20) {
    cache::ModelSpec spec = cache::SmallModel("jobs", 4, 2);
    spec.rope_theta = 10000;
    model_ = world_.Register(spec);
  }

  static policies::Policy Policy(const std::string& text) { return *policies::ParsePolicy(text); }
  static Positions Range(std::uint64_t begin, std::uint64_t end) {
    Positions range(end - begin);
    std::iota(range.begin(), range.end(), begin);
    return range;
  }
  static Positions Join(Positions a, const Positions& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  Positions PositionsOf(const Track& track, std::uint32_t lane = 0) {
    return track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes[lane].positions;
  }
  void Cut(Track& track, std::uint64_t tokens) {
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, tokens).ok());
    track.tail.reset();
    track.stamps.resize(tokens);
  }
  // The query of tokens [first, first + count): a scaled copy of this stamp's key in each lane.
  struct Query {
    std::uint64_t stamp;
    float times;
  };
  void ShowQueries(const Track& track, std::uint64_t first, std::uint64_t count, const Query& query,
                   bool sums = false) {
    const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(policy, layer) != layer) continue;
      const std::uint32_t heads = model_->geometry(layer).query_heads;
      std::vector<std::byte> rows;
      for (std::uint64_t i = 0; i < count * heads; ++i) {
        const auto lane = static_cast<std::uint32_t>(i % heads) / model_->geometry(layer).group();
        const std::vector<std::byte> row = Row(query, layer, lane);
        rows.insert(rows.end(), row.begin(), row.end());
      }
      std::vector<float> paid(2 * track.stamps.size());
      std::iota(paid.begin(), paid.end(), 1.0f);
      ObservedLayer shown = {.layer = layer, .tokens = track.stamps.size()};
      shown.last = {first, count, rows.data()};
      if (sums) shown.sums = {0, track.stamps.size(), paid.data()};
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  // 99 of 100 tokens are kept, and the newest is evicted: its own query, reversed, gives it the
  // least attention, as no other key is as long in its direction.
  Track WithoutItsNewest() {
    for (;;) {
      Track track = NewTrack(Policy("tova:budget=99"));
      Append(track, 99, 1);
      Append(track, 1, 2);
      ShowQueries(track, 99, 1, {track.stamps[99], -10});
      const auto told = Compress(track);
      RunAll();
      ExpectTold(*told);
      bool everywhere = true;
      for (std::uint32_t lane = 0; lane < model_->lanes(); ++lane) {
        everywhere = everywhere && PositionsOf(track, lane) == Range(0, 99);
      }
      if (everywhere || told->times != 1 || HasFailure()) return track;
      track.sequence->Free();
    }
  }
  std::vector<std::byte> Row(const Query& query, std::uint32_t layer, std::uint32_t kv_head) {
    const kernels::DenseTile tile = model_->layout().tile(layer);
    std::vector<std::byte> row(tile.row_bytes());
    DrawRow(query.stamp, {layer, kv_head, cache::RowKind::kKey}, tile, row.data());
    for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
      SetElement(row.data(), tile.type, d, query.times * ElementAt(row.data(), tile.type, d));
    }
    return row;
  }
};

TEST_F(TokenJobs, APolicyThatIsSetWhileAChoiceWaitsIsNotHeldUp) {
  Track track = NewTrack(Policy("streaming:sink=2,recent=40"));
  Append(track, 100, 1, /*end_of_prompt=*/true);
  const auto told = Compress(track);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("streaming:sink=2,recent=10")).ok());
  RunAll();
  ExpectTold(*told, absl::StatusCode::kAborted);
  Decode(track, 28, 1);
  EXPECT_EQ(scheduler_.Queued().size(), 4u) << "the next choice waits for ever";
  RunAll();
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 2), Range(118, 128)));
}

TEST_F(TokenJobs, WhoAsksIsToldThatNothingIsChosenAnyMore) {
  Track track = NewTrack(Policy("streaming:sink=2,recent=40"));
  Append(track, 100, 1);
  const auto told = Compress(track);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("dense")).ok());
  RunAll();
  ExpectTold(*told, absl::StatusCode::kAborted);
}

TEST_F(TokenJobs, WhatIsCountedHasHappened) {
  Track track = NewTrack(Policy("streaming:sink=2,recent=40"));
  Append(track, 100, 1);
  for (int i = 0; i < 3; ++i) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(counters().decisions_made, 4u) << "of each layer one; nothing has come since";
  }
  const cache::TenantCounters& counted = world_.tenant().counters();
  EXPECT_EQ(counted.entries_dropped, 58u * model_->lanes());
  EXPECT_EQ(counted.pack_bytes_before, 0u) << "nothing was packed";
  EXPECT_EQ(counted.pack_bytes_after, 0u);
}

TEST_F(TokenJobs, KeysAreTurnedBackOnlyFromWhereTheirTokensStand) {
  const policies::Policy turns = Policy("semanticache:delimiters=0,key_space=pre");
  Track track = NewTrack(Policy("streaming:sink=2,recent=40,pos=slot"));
  Append(track, 100, 1, /*end_of_prompt=*/true);
  EXPECT_TRUE(compactor_.SetPolicy(*track.sequence, turns).ok()) << "nothing has moved as yet";
  ASSERT_TRUE(
      compactor_.SetPolicy(*track.sequence, Policy("streaming:sink=2,recent=40,pos=slot")).ok());
  const auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  const absl::Status moved = compactor_.SetPolicy(*track.sequence, turns);
  EXPECT_EQ(moved.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(moved.message(), testing::HasSubstr("by 58 at the end")) << moved;
  cache::ModelSpec still = cache::SmallModel("still", 4, 2);
  model_ = world_.Register(still);
  const absl::Status none =
      compactor_.SetPolicy(*world_.NewSequence(worker_->session(), *model_), turns);
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(none.message(), testing::HasSubstr("has no rotary positions")) << none;
}

TEST_F(TokenJobs, ALaneThatIsCutWhileItIsChosenFromIsLookedAtAgain) {
  for (const char* text : {"streaming:sink=2,recent=40", "streaming:sink=2,recent=40,pos=slot",
                           "streaming:sink=2,recent=40+mosaickv:sinks=0,recent=0,min_segment=32,"
                           "segment=64,select=0"}) {
    SCOPED_TRACE(text);
    CallbackClock clock;
    Compactor compactor({.scheduler = &scheduler_,
                         .logger = &logger_,
                         .clock = &clock,
                         .operations = &kernels::OperationsOf(kernels::BestImplementation())});
    Track track = NewTrack(Policy("dense"));
    ASSERT_TRUE(compactor.SetPolicy(*track.sequence, Policy(text)).ok());
    Append(track, 100, 1);
    absl::Status told;
    const auto compress = [&] {
      compactor.Compress(track.sequence, {0, 4, true}, [&](absl::Status s) { told = s; });
      RunAll();
    };
    compress();
    ASSERT_TRUE(told.ok()) << told;
    Append(track, 30, 1);
    const bool moves = track.sequence->position_shift() > 0;
    clock.After(2, [&] { TruncateInsideJob(track, moves ? 0 : 110); });
    compress();
    EXPECT_TRUE(told.ok()) << told;
    const Positions left = moves ? Positions() : Join(Range(0, 2), Range(70, 110));
    EXPECT_EQ(PositionsOf(track), left);
    EXPECT_EQ(worker_->Block(*track.sequence).next_position.load(), track.stamps.size());
    track.sequence->Free();
  }
}

TEST_F(TokenJobs, TheNextTokenIsAtItsOwnPositionWhenTheNewestHaveGone) {
  Track track = WithoutItsNewest();
  ASSERT_EQ(PositionsOf(track), Range(0, 99));
  Append(track, 10, 1);
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 99), Range(100, 110)));
  // It continues, first without and then with new tokens.
  Append(track, 10, 1);
  ShowQueries(track, 100, 20, {track.stamps[0], 1});
  const auto more = Compress(track);
  RunAll();
  ExpectTold(*more);
  EXPECT_EQ(PositionsOf(track).size(), 99u);
}

TEST_F(TokenJobs, AsManyTimesAsItIsAskedNothingNewChangesNothing) {
  Track track = WithoutItsNewest();
  for (int i = 0; i < 3; ++i) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  Append(track, 20, 1);
  ShowQueries(track, 100, 20, {track.stamps[0], 1});
  const auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(PositionsOf(track).size(), 99u);
}

// Its last query decides about the whole prompt. While a query is missing, nothing is decided.
TEST_F(TokenJobs, ASecondPromptIsOneForwardStep) {
  for (int round = 0; round < 8; ++round) {
    Track track = NewTrack(Policy("tova:budget=10"));
    Append(track, 10, 1);
    ShowQueries(track, 9, 1, {track.stamps[0], 1});
    auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    // One key is so much longer than the others that its own query attends only to it.
    Stamps second = DrawTokens(30, 1);
    second[5] |= kHuge;
    AppendStamps(track, second);
    ShowQueries(track, 10, 20, {track.stamps[0], 8});
    compactor_.TailsMoved(track.sequence);
    RunAll();
    EXPECT_EQ(PositionsOf(track), Range(0, 40));
    ShowQueries(track, 30, 9, {track.stamps[0], 8});
    ShowQueries(track, 39, 1, {track.stamps[15], 8});
    told = Compress(track);
    RunAll();
    ExpectTold(*told);
    const std::vector<std::uint64_t> kept = PositionsOf(track);
    EXPECT_EQ(kept.size(), 10u);
    EXPECT_TRUE(std::ranges::binary_search(kept, 15u));
  }
}

// Decoded tokens before it trigger a decision, but an incomplete prompt is left alone.
TEST_F(TokenJobs, APromptThatStillComesIsLeftAlone) {
  Track track = NewTrack(Policy("lacache:budget=40,span=2,sink=4"));
  Append(track, 60, 1);
  auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  const std::size_t left = PositionsOf(track).size();
  Append(track, 50, 1);
  compactor_.TailsMoved(track.sequence);
  RunAll();
  EXPECT_EQ(PositionsOf(track).size(), left + 50);
  Append(track, 50, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_LE(PositionsOf(track).size(), 41u);
}

// Whenever a decision is requested.
TEST_F(TokenJobs, WhatWasDecodedWithoutAPromptIsDecidedTokenByToken) {
  for (const char* text :
       {"lacache:budget=10,span=2,overlap=0,sink=0",
        "lacache:budget=10,span=2,overlap=0,sink=0,pass=uniform", "streaming:sink=2,recent=8"}) {
    Track often = NewTrack(Policy(text));
    Track once = NewTrack(Policy(text));
    for (const std::uint64_t stamp : DrawTokens(30, 1)) {
      DecodeByCalls(often, {stamp});
      DecodeByCalls(once, {stamp});
      const auto told = Compress(often);
      RunAll();
      ExpectTold(*told);
    }
    const auto told = Compress(once);
    RunAll();
    ExpectTold(*told);
    for (std::uint32_t lane = 0; lane < 8; ++lane) {
      EXPECT_LE(PositionsOf(once, lane).size(), 10u) << text;
      EXPECT_EQ(PositionsOf(once, lane), PositionsOf(often, lane)) << text << ", lane " << lane;
    }
  }
}

// A refused append does not count as a prompt.
TEST_F(TokenJobs, ARefusedAppendLeavesNoTrace) {
  Track track = NewTrack(Policy("streaming:sink=4,recent=36"));
  Append(track, 60, 1);
  auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  Decode(track, 64, 1);
  const auto refused = compactor_.Append(
      track.sequence, {.layers = model_->layers(), .first_token = 60, .until = 260},
      DrawnRows(model_->layout(), DrawTokens(200, 1)));
  EXPECT_TRUE(absl::IsOutOfRange(refused.status())) << refused.status();
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 4), Range(120, 156)));
}

TEST_F(TokenJobs, ASequenceThatWasCutGoesOn) {
  Track track = NewTrack(Policy("h2o:heavy=10,recent=10"));
  Append(track, 100, 1);
  ShowQueries(track, 90, 10, {track.stamps[3], 1}, /*sums=*/true);
  auto told = Compress(track);
  RunAll();
  ExpectTold(*told);
  for (const std::uint64_t tokens : {95, 50}) {
    Cut(track, tokens);
    Append(track, 40, 2);
    ShowQueries(track, tokens, 40, {track.stamps[3], 1});
    told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(PositionsOf(track).size(), 20u);
    EXPECT_EQ(PositionsOf(track).back(), tokens + 39);
  }
  // After a cut to 0 it is a new prompt, which waits for its worker's observations.
  Cut(track, 0);
  Append(track, 60, 3);
  told = Compress(track);
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(PositionsOf(track), Range(0, 60));
}

TEST_F(TokenJobs, TilesGrowOneSegmentThoughOthersLoseEntries) {
  Track track = NewTrack(Policy(
      "streaming:sink=4,recent=640+mosaickv:sinks=0,recent=0,min_segment=64,segment=128,select=0"));
  Append(track, 640, 1, /*end_of_prompt=*/true);
  RunAll();
  for (int tile = 0; tile < 40; ++tile) {
    Decode(track, 32, 1);
    RunAll();
  }
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 4), Range(1280, 1920)));
  EXPECT_LT(track.sequence->Describe(true).lanes[0].segments, 8u);
}

// The first of a layer's two lanes uses up the memory.
TEST_F(TokenJobs, WhatMemoryInterruptedIsFinishedFirst) {
  for (const char* text : {"lacache:budget=48,span=2,overlap=1,sink=2", "tova:budget=30"}) {
    int interrupted = 0;
    for (std::uint64_t room = 4096; room < 400'000; room += 4096) {
      Track track = NewTrack(Policy(text));
      Append(track, 200, 1);
      if (text[0] == 't') ShowQueries(track, 199, 1, {track.stamps[3], 1});
      auto& account = const_cast<pool::Account&>(world_.tenant().account());
      const std::uint64_t free = account.limit_bytes() - account.used_bytes();
      if (free <= room) break;
      auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
      // Delays the freeing of evicted rows.
      std::optional<cache::Tenant::Reader> reader(world_.tenant());
      const auto told = Compress(track);
      RunAll();
      reader.reset();
      Collect();
      squeezed.Reset();
      const bool short_of_it = absl::IsResourceExhausted(told->status);
      EXPECT_TRUE(short_of_it || told->status.ok()) << told->status;
      for (std::uint32_t lane = 0; lane < 8; lane += 2) {
        interrupted += PositionsOf(track, lane).size() != PositionsOf(track, lane + 1).size();
      }
      const Track fork = Fork(track);
      for (const Track* each : {&std::as_const(track), &fork}) {
        // The observations remain with the parent.
        if (each == &fork && text[0] == 't') ShowQueries(fork, 199, 1, {track.stamps[3], 1});
        const auto again = Compress(*each);
        RunAll();
        ExpectTold(*again);
        for (std::uint32_t lane = 0; lane < 8; ++lane) {
          EXPECT_LE(PositionsOf(*each, lane).size(), 60u) << "room " << room << " lane " << lane;
        }
      }
      fork.sequence->Free();
      track.sequence->Free();
      Collect();
      if (told->status.ok()) break;
    }
    EXPECT_GT(interrupted, 0) << text;
  }
}

// Compressing again without new tokens keeps the decision and needs no observations, whether or not
// memory interrupted it. The kept tokens may be contiguous, or all of a lane.
TEST_F(TokenJobs, WhatIsDecidedIsNotDecidedAgain) {
  for (const char* text :
       {"chunkkv:budget=0.7,chunk=4,window=8", "chunkkv:budget=0.7,chunk=4,window=8,reuse=2",
        "chunkkv:budget=0.7,chunk=4,window=8,scope=head", "snapkv:budget=0.7,window=8",
        "chunkkv:budget=0.7,chunk=4,window=8+quest"}) {
    int interrupted = 0;
    for (std::uint64_t room = 1024; room < 400'000; room += 1024) {
      Track track = NewTrack(Policy(text));
      Append(track, 19, 1);
      Decode(track, 7, 1);
      ShowQueries(track, 18, 8, {track.stamps[3], 1});
      auto& account = const_cast<pool::Account&>(world_.tenant().account());
      const std::uint64_t free = account.limit_bytes() - account.used_bytes();
      if (free <= room) break;
      auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
      // Delays the freeing of evicted rows.
      std::optional<cache::Tenant::Reader> reader(world_.tenant());
      const auto told = Compress(track);
      RunAll();
      reader.reset();
      Collect();
      squeezed.Reset();
      EXPECT_TRUE(told->status.ok() || absl::IsResourceExhausted(told->status)) << told->status;
      interrupted += !told->status.ok();
      std::vector<std::vector<std::uint64_t>> kept;
      for (int again = 0; again < 2; ++again) {
        const auto status = Compress(track);
        RunAll();
        EXPECT_TRUE(status->status.ok()) << text << ", room " << room << ": " << status->status;
        for (std::uint32_t lane = 0; lane < 8; ++lane) {
          if (again == 0) kept.push_back(PositionsOf(track, lane));
          EXPECT_EQ(PositionsOf(track, lane), kept[lane]) << text << ", room " << room;
        }
      }
      // One budget per lane, or one for both lanes of a layer.
      for (std::uint32_t lane = 0; lane < 8; lane += 2) {
        EXPECT_LE(kept[lane].size() + kept[lane + 1].size(), 40u) << text << ", room " << room;
        EXPECT_GE(kept[lane].size() + kept[lane + 1].size(), 32u) << text << ", room " << room;
      }
      track.sequence->Free();
      Collect();
      if (told->status.ok()) break;
    }
    EXPECT_GT(interrupted, 0) << text;
  }
}

// After a cut in between, the remaining choice applies to the remaining tokens.
TEST_F(TokenJobs, WhatMemoryInterruptedIsFinishedAfterACut) {
  for (const std::uint64_t cut_to : {199u, 150u, 20u, 0u}) {
    int interrupted = 0;
    for (std::uint64_t room = 4096; room < 400'000; room += 4096) {
      Track track = NewTrack(Policy("tova:budget=30"));
      Append(track, 200, 1);
      ShowQueries(track, 199, 1, {track.stamps[3], 1});
      auto& account = const_cast<pool::Account&>(world_.tenant().account());
      const std::uint64_t free = account.limit_bytes() - account.used_bytes();
      if (free <= room) break;
      auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
      std::optional<cache::Tenant::Reader> reader(world_.tenant());
      const auto told = Compress(track);
      RunAll();
      reader.reset();
      Collect();
      squeezed.Reset();
      for (std::uint32_t lane = 0; lane < 8; lane += 2) {
        interrupted += PositionsOf(track, lane).size() != PositionsOf(track, lane + 1).size();
      }
      Cut(track, cut_to);
      Append(track, 40, 1);
      const std::uint64_t last = track.stamps.size() - 1;
      ShowQueries(track, last, 1, {track.stamps[1], 1});
      const auto again = Compress(track);
      RunAll();
      EXPECT_TRUE(again->status.ok() || absl::IsFailedPrecondition(again->status));
      EXPECT_EQ(again->status.ToString().find("equally many"), std::string::npos) << again->status;
      for (std::uint32_t lane = 0; lane < 8; lane += 2) {
        EXPECT_EQ(PositionsOf(track, lane).size(), PositionsOf(track, lane + 1).size())
            << "room " << room << " lane " << lane << " cut to " << cut_to;
      }
      track.sequence->Free();
      Collect();
      if (told->status.ok()) break;
    }
    EXPECT_GT(interrupted, 0) << cut_to;
  }
}

TEST_F(TokenJobs, MoreEntriesThanASegmentHolds) {
  model_ = world_.Register(cache::SmallModel("long", 1, 1));
  constexpr std::uint64_t kTokens = shm::kMaxSegmentEntries + 5000;
  Track track = NewTrack(Policy("streaming:sink=100,recent=69000"));
  Append(track, kTokens, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 100), Range(kTokens - 69000, kTokens)));
  Append(track, 70, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(PositionsOf(track), Join(Range(0, 100), Range(kTokens + 70 - 69000, kTokens + 70)));
  const Track fork = Fork(track);
  Cut(track, 66000);
  EXPECT_EQ(PositionsOf(track).back(), 65999u);
  EXPECT_EQ(PositionsOf(fork).size(), 69100u);
}

}  // namespace
}  // namespace tessera::compaction
