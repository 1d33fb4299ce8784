#include "daemon/compaction/jobs/compactor.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kRawTile = 2 * 32 * 64 * 2;  // K and V of a lane's tile, bf16

// ---- Prompts

TEST_F(CompactorTest, ThePromptsEndIsSealed) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 150, 1);
  EXPECT_TRUE(scheduler_.Queued().empty());
  Append(track, 50, 1, /*end_of_prompt=*/true);
  EXPECT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal}));
  EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
  ASSERT_TRUE(scheduler_.RunFirst(kSeal));
  // Lane by lane.
  const cache::SequenceView view = View(track);
  EXPECT_TRUE(view.segments[0].shape.packed());
  EXPECT_FALSE(view.segments[1].shape.packed());
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 200"});
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(counters().segments_sealed, 2u);
  EXPECT_EQ(counters().strategies_made, 2u);
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), track.sequence->Describe(false).tile_bytes);
}

TEST_F(CompactorTest, ALongPromptIsSealedSegmentBySegmentAsItComes) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 200, 1);
  EXPECT_TRUE(scheduler_.Queued().empty());
  Append(track, 400, 1);
  EXPECT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal}));
  Append(track, 100, 2);  // at most one seal per lane waits
  EXPECT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal}));
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 256", "plain: 188"}));
  EXPECT_EQ(Shown(track), "");
  // Appends to the dense remainder.
  Append(track, 20, 2);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 256", "plain: 208"}));
  Append(track, 60, 2, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(FormsOf(track).size(), 4u);
  EXPECT_EQ(Shown(track), "");
}

TEST_F(CompactorTest, LayersAreCompressedByThemselves) {
  model_ = world_.Register(cache::SmallModel("layers", 3, 1));
  Track track = NewTrack(SmallMosaic());
  const Stamps stamps = DrawTokens(100, 1);
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(
        track.sequence->Append({layer, 1, 0, stamps.size()}, DrawnRows(model_->layout(), stamps))
            .ok());
    compactor_.Appended(
        track.sequence,
        {.first_layer = layer, .layers = 1, .end_of_prompt = layer == 1, .until = stamps.size()});
  }
  RunAll();
  const cache::SequenceView view = View(track);
  EXPECT_FALSE(view.segments[0].shape.packed());
  EXPECT_TRUE(view.segments[1].shape.packed());
  EXPECT_FALSE(view.segments[2].shape.packed());
}

// ---- Decoding

TEST_F(CompactorTest, NewTilesTakeTheStrategyBeforeUntilTheyLoseTooMuch) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  const std::uint64_t rotations = Used(pool::MemoryTag::kRotations);
  Decode(track, 40, 1);
  EXPECT_EQ(scheduler_.Queued(), Forms{kTiles});
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 32"}));
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 32"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), rotations);  // shared
  EXPECT_GE(RawBytes(), 2 * kRawTile);
  EXPECT_EQ(counters().tiles_encoded, 2u);
  // The segment grows, as the loss is small.
  Decode(track, 64, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 96"}));
  EXPECT_EQ(counters().segments_sealed, 2u);
  EXPECT_EQ(Shown(track), "");
  // Rows that do not fit the strategy.
  Decode(track, 64, 2);
  while (scheduler_.RunFirst(kTiles)) {
  }
  EXPECT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal}));
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 160"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * rotations);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(counters().segments_sealed, 4u);
  EXPECT_EQ(Shown(track), "");
}

TEST_F(CompactorTest, BelowTheMinimumNothingIsCutWhateverItLoses) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 128;
  Track track = NewTrack(policy);
  Append(track, 256, 1, true);
  RunAll();
  for (int tile = 1; tile <= 3; ++tile) {
    Decode(track, 32, 2);
    RunAll();
    EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: " + std::to_string(32 * tile)}));
    EXPECT_EQ(counters().segments_sealed, 2u);
  }
  Decode(track, 32, 2);
  RunAll();
  EXPECT_EQ(counters().segments_sealed, 4u);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 128"}));
  EXPECT_EQ(Shown(track), "");
}

TEST_F(CompactorTest, ASegmentThatFitsIsCutByItsLength) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 256, 1, true);
  RunAll();
  for (int tile = 0; tile < 7; ++tile) {
    Decode(track, 32, 1);
    RunAll();
  }
  EXPECT_EQ(counters().segments_sealed, 2u);
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(counters().segments_sealed, 4u);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 256"}));
  EXPECT_EQ(Shown(track), "");
}

TEST_F(CompactorTest, WithoutAStrategyBeforeTilesStayPlainUntilTheMinimum) {
  Track track = NewTrack(SmallMosaic());
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"plain: 32"});
  EXPECT_EQ(RawBytes(), 0u);
  Decode(track, 40, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 64"});
  EXPECT_EQ(Shown(track), "");
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 64", "16 kept: 32"}));
  EXPECT_EQ(Shown(track), "");
}

// A closed tail leaves rows that do not fill a tile. They stay dense, and are encoded together with
// later ones.
TEST_F(CompactorTest, RowsThatFillNoTileWait) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  Append(track, 45, 1);
  compactor_.TailsMoved(track.sequence);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 32", "plain: 13"}));
  Append(track, 18, 1);
  compactor_.TailsMoved(track.sequence);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 32", "plain: 31"}));
  Append(track, 2, 1);
  compactor_.TailsMoved(track.sequence);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 64", "plain: 1"}));
  EXPECT_EQ(Shown(track), "");
}

// ---- Budget of raw copies

class SmallBudget : public CompactorTest {
 protected:
  SmallBudget() : CompactorTest(/*raw_copy_bytes=*/1 << 20) {}
};

TEST_F(SmallBudget, AlongRunIsSealedWhenItIsSpent) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  Decode(track, 64, 1);
  RunAll();
  EXPECT_EQ(counters().segments_sealed, 2u);
  const pool::Charge rest = SqueezeRaw(kRawTile - 1);
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 96"}));
  EXPECT_EQ(counters().segments_sealed, 4u);
  EXPECT_EQ(counters().raw_rows_dropped, 0u);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(LogLines(), 0);
}

TEST_F(SmallBudget, AShortRunGivesUpItsRawRowsForAsManyTokensAsASegmentHasAtLeast) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  Decode(track, 32, 1);
  RunAll();
  {
    const pool::Charge rest = SqueezeRaw(0);
    Decode(track, 32, 2);
    RunAll();
    // The run just reaches the minimum length.
    EXPECT_EQ(counters().segments_sealed, 4u);
    const pool::Charge again = SqueezeRaw(0);  // the seal has made room
    Decode(track, 32, 1);
    RunAll();
    EXPECT_EQ(counters().raw_rows_dropped, 2 * 32u);
    EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 64", "16 kept: 32"}));
    // For any length and any loss.
    Decode(track, 64, 3);
    RunAll();
    EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 64", "16 kept: 96"}));
    EXPECT_EQ(counters().segments_sealed, 4u);
    EXPECT_EQ(Shown(track), "");
    // Then the budget decides again.
    Decode(track, 96, 3);
    RunAll();
    EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 64", "16 kept: 96", "16 kept: 96"}));
    EXPECT_EQ(counters().segments_sealed, 6u);
    EXPECT_EQ(Shown(track), "");
  }
  EXPECT_EQ(LogLines(), 0);
  // With room again, raw rows are kept again.
  for (int i = 0; i < 8; ++i) {
    Decode(track, 32, 4);
    RunAll();
  }
  EXPECT_GT(counters().segments_sealed, 6u);
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(LogLines(), 0);
}

TEST_F(SmallBudget, RawRowsThatAForkSharesAreGivenUpForBoth) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 128;
  Track parent = NewTrack(policy);
  Append(parent, 128, 1, true);
  RunAll();
  Decode(parent, 64, 1);
  RunAll();
  const std::uint64_t raw = RawBytes();
  EXPECT_GE(raw, 4 * kRawTile);
  Track child = Fork(parent);
  const pool::Charge rest = SqueezeRaw(0);
  Decode(child, 32, 1);
  RunAll();
  // The room released by the first lane is used by the second.
  EXPECT_EQ(counters().raw_rows_dropped, 64 + 32u);
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
  Decode(parent, 256, 2);
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
  const auto told = Compress(parent);
  RunAll();
  ExpectTold(*told);
  EXPECT_EQ(Shown(parent), "");
}

// Readers of replaced rows keep their tiles alive, but not their raw copies.
TEST_F(CompactorTest, RawRowsGoWithTheSealWhoeverReads) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->segments.min_tokens = 128;
  Track parent = NewTrack(policy);
  Append(parent, 128, 1, true);
  RunAll();
  const auto seal = [&](const Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  };
  Decode(parent, 64, 1);
  RunAll();
  EXPECT_GT(RawBytes(), 0u);
  shm::Word& slot = worker_->session().control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
  seal(parent);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_TRUE(shm::Unpin(slot, pin));
  // A fork that waits with the same raw copies keeps them.
  Decode(parent, 64, 1);
  RunAll();
  const Track child = Fork(parent);
  seal(parent);
  EXPECT_GT(RawBytes(), 0u);
  world_.tenant().epochs().Collect();
  EXPECT_GT(RawBytes(), 0u);
  seal(child);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(child), "");
}

// ---- Block summaries

TEST_F(CompactorTest, SummariesGrowTileByTile) {
  Track track = NewTrack(Quest());
  Append(track, 80, 1, true);
  EXPECT_EQ(scheduler_.Queued(), Forms{kTiles});
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"summed up: 64", "plain: 16"}));
  for (int tile = 1; tile <= 12; ++tile) {  // more than the first table holds
    Decode(track, 32, 1);
    RunAll();
    EXPECT_EQ(FormsOf(track), Forms{"summed up: " + std::to_string(64 + 32 * tile)});
  }
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(RawBytes(), 0u);
}

TEST_F(CompactorTest, LayersThatAreReadWholeHaveNoSummaries) {
  model_ = world_.Register(cache::SmallModel("layers", 2, 1));
  policies::Policy policy = Quest();
  policy.selection->dense_layers = 1;
  Track track = NewTrack(policy);
  Append(track, 64, 1, true);
  RunAll();
  const cache::SequenceView view = View(track);
  EXPECT_EQ(FormOf(view.segments[0]), "plain: 64");
  EXPECT_EQ(FormOf(view.segments[1]), "summed up: 64");
  EXPECT_EQ(Shown(track), "");
}

TEST_F(CompactorTest, AnExplicitPackingEndsTheGrowthOfSummaries) {
  Track track = NewTrack(Quest());
  Append(track, 64, 1, true);
  RunAll();
  Append(track, 10, 1);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, policies::Policy()).ok());
  kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
  shape.summary = Quest().summaries->summary;
  shape.block = static_cast<std::uint8_t>(Quest().summaries->block);
  ASSERT_TRUE(track.sequence->Pack({.shapes = {shape}}, cache::Proceed).ok());
  EXPECT_EQ(FormsOf(track), (Forms{"summed up: 64", "summed up: 10"}));
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Quest()).ok());
  Append(track, 40, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"summed up: 64", "summed up: 10", "summed up: 32", "plain: 8"}));
  EXPECT_EQ(Shown(track), "");
}

// ---- Results for callers

TEST_F(CompactorTest, CompressAnswersOnce) {
  Track dense = {world_.NewSequence(worker_->session(), *model_), {}, std::nullopt};
  Append(dense, 50, 1);
  ExpectTold(*Compress(dense));  // without a policy there is nothing to do
  ASSERT_TRUE(compactor_.SetPolicy(*dense.sequence, policies::Policy()).ok());
  ExpectTold(*Compress(dense));

  for (const policies::Policy& policy : {SmallMosaic(), Quest()}) {
    Track track = NewTrack(policy);
    const auto of_nothing = Compress(track);
    RunAll();
    ExpectTold(*of_nothing);
    Append(track, 200, 1);
    const auto first = Compress(track);
    const auto second = Compress(track);
    EXPECT_EQ(first->times + second->times, 0);
    RunAll();
    ExpectTold(*first);
    ExpectTold(*second);
    EXPECT_EQ(Shown(track), "");
  }
}

class SmallTenant : public CompactorTest {
 protected:
  static constexpr std::uint64_t kLimit = 6 << 20;
  SmallTenant() : CompactorTest(0, kLimit) {}
  pool::Charge Squeeze(std::uint64_t room) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - room);
  }
};

TEST_F(SmallTenant, CompressReturnsErrors) {
  for (const policies::Policy& policy : {SmallMosaic(), Quest()}) {
    Track track = NewTrack(policy);
    Append(track, 200, 1);
    const std::uint64_t used = world_.tenant().account().used_bytes();
    {
      const pool::Charge rest = Squeeze(4096);
      const auto told = Compress(track);
      RunAll();
      ExpectTold(*told, absl::StatusCode::kResourceExhausted);
    }
    EXPECT_EQ(world_.tenant().account().used_bytes(), used);
    EXPECT_EQ(FormsOf(track), Forms{"plain: 200"});
    EXPECT_EQ(Shown(track), "");
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(Shown(track), "");
  }
}

// A seal of the same lane that no caller waits for runs first and fails.
TEST_F(SmallTenant, CompressReturnsErrorsOfEarlierWork) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 300, 1);
  ASSERT_EQ(scheduler_.Queued().size(), 2u);
  const auto told = Compress(track);
  {
    const pool::Charge rest = Squeeze(4096);
    RunAll();
  }
  ExpectTold(*told, absl::StatusCode::kResourceExhausted);
}

TEST_F(CompactorTest, WorkOfASchedulerThatEndsIsTold) {
  auto scheduler = std::make_unique<ManualScheduler>();
  Compactor compactor({.scheduler = scheduler.get(),
                       .logger = &logger_,
                       .clock = &world_.clock(),
                       .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1);
  int told = 0;
  compactor.Compress(track.sequence, {0, 1, true}, [&](absl::Status) { ++told; });
  scheduler.reset();
  EXPECT_EQ(told, 1);
}

// ---- Values that a form cannot hold

TEST_F(CompactorTest, RowsThatFp16CannotHoldStayPlain) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->strategy.values = kernels::ValueType::kFp16;
  Track track = NewTrack(policy);
  Append(track, 256, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"16 kept: 256"});
  Stamps stamps = DrawTokens(32, 1);
  stamps[7] |= kHuge;
  DecodeStamps(track, stamps);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "plain: 32"}));
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(LogLines(), 0);
  // Later rows are encoded again.
  Decode(track, 32, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "plain: 32", "16 kept: 32"}));
  stamps = DrawTokens(100, 1);
  stamps[99] |= kHuge;
  AppendStamps(track, stamps, true);
  RunAll();
  EXPECT_EQ(Shown(track), "");
  Append(track, 64, 1, true);
  RunAll();
  EXPECT_EQ(FormsOf(track).back(), "16 kept: 64");
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(RawBytes(), 0u);
}

// A provisional run before rows that stay dense for good is never re-encoded, so its raw copies are
// dropped.
TEST_F(CompactorTest, RawRowsThatNothingComesBackToAreNotKept) {
  policies::Policy policy = SmallMosaic();
  policy.mosaic->strategy.values = kernels::ValueType::kFp16;
  Track track = NewTrack(policy);
  Append(track, 256, 1, true);
  RunAll();
  Decode(track, 32, 1);
  RunAll();
  EXPECT_GT(RawBytes(), 0u);
  Stamps stamps = DrawTokens(32, 1);
  stamps[7] |= kHuge;
  DecodeStamps(track, stamps);
  RunAll();
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 256", "16 kept: 32", "plain: 32"}));
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_EQ(Shown(track), "");
}

}  // namespace
}  // namespace tessera::compaction
