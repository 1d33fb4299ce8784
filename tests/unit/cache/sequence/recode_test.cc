// Recoding of the newest part of a lane, concurrent with other operations: no token is lost, no
// reader sees an intermediate state, and a failure changes nothing.

#include "daemon/cache/segment/recode.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/cache/sequence/recode_fixture.h"

namespace tessera::cache {
namespace {

using kernels::kTileEntries;

using Recode = RecodeFixture;

TEST_F(Recode, PlainRowsAreSwappedAndTheRemainderIsAppendedTo) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 77);
  EXPECT_EQ(sequence->OpenEntries(0), 77u);
  ASSERT_TRUE(sequence
                  ->Recode({.lane = 0},
                           [&](const OpenRun& run) -> Swap {
                             EXPECT_EQ(run.layer, 0u);
                             EXPECT_EQ(run.first_position, 0u);
                             EXPECT_EQ(run.previous, nullptr);
                             EXPECT_FALSE(run.grows);
                             EXPECT_EQ(run.plain_entries(), 77u);
                             return Into(sequence, Quarter())(run);
                           })
                  .ok());
  EXPECT_EQ(Forms(*sequence), "packed 64, plain 13");
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(sequence->OpenEntries(0), 13u);
  AppendMore(*sequence, stamps, 10);
  EXPECT_EQ(Forms(*sequence), "packed 64, plain 23");
  EXPECT_EQ(Shown(*sequence, stamps), "");
  Collect();
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), sequence->Describe(false).tile_bytes);
}

TEST_F(Recode, LanesAreNumberedAsTheModelNumbersThem) {
  const auto mixed = world_.Register(MixedModel("mixed", kernels::ElementType::kBf16));
  const auto sequence = world_.NewSequence(worker_->session(), *mixed);
  Fill(*sequence, 40);
  for (std::uint32_t lane = 0; lane < mixed->lanes(); ++lane) {
    ASSERT_TRUE(sequence
                    ->Recode({.lane = lane},
                             [&](const OpenRun& run) -> Swap {
                               EXPECT_EQ(mixed->layout().lane(run.layer, run.kv_head), lane);
                               EXPECT_LT(run.kv_head, mixed->layout().kv_heads(run.layer));
                               return std::nullopt;
                             })
                    .ok());
  }
}

TEST_F(Recode, TheSegmentBeforeGrowsByWholeTiles) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps;
  // More tiles than the first table holds, several at a time.
  for (std::uint64_t expected = 0; expected < 20;) {
    const std::uint64_t tiles = random_.Between(1, 4);
    AppendMore(*sequence, stamps, 32 * tiles);
    expected += tiles;
    ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
    EXPECT_EQ(Forms(*sequence), "packed " + std::to_string(32 * expected));
    EXPECT_EQ(Shown(*sequence, stamps), "");
    Collect();
    EXPECT_EQ(Used(pool::MemoryTag::kTiles), sequence->Describe(false).tile_bytes);
  }
}

TEST_F(Recode, ReadersThatLookedBeforeKeepWhatTheySaw) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 256 + 40);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  Collect();
  const Tenant::Reader pinned(world_.tenant());
  const SequenceView before = View(*sequence);
  const Stamps then = stamps;
  AppendMore(*sequence, stamps, 60);  // the table moves as the segment grows
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  Collect();
  EXPECT_EQ(PackedDiffers(before, *small_, std::vector<Stamps>(2, then)), "");
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Recode, NothingComesOfItWhereNothingIsReturned) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 50);
  const std::uint64_t used = world_.tenant().account().used_bytes();
  int asked = 0;
  const auto nothing = [&](const OpenRun&) -> Swap {
    ++asked;
    return std::nullopt;
  };
  EXPECT_TRUE(sequence->Recode({.lane = 0}, nothing).ok());
  EXPECT_TRUE(sequence->Recode({.lane = 0, .min_dense_entries = 51}, nothing).ok());
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(world_.tenant().account().used_bytes(), used);
  AppendMore(*sequence, stamps, 3);
  EXPECT_EQ(Forms(*sequence), "plain 53");  // reopened
  EXPECT_EQ(Shown(*sequence, stamps), "");
  const auto empty = world_.NewSequence(worker_->session(), *small_);
  EXPECT_TRUE(empty->Recode({.lane = 0}, nothing).ok());
  EXPECT_EQ(asked, 1);
}

TEST_F(Recode, AnErrorIsAnsweredAndChangesNothing) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 50);
  EXPECT_EQ(
      sequence->Recode({.lane = 1}, [](const OpenRun&) -> Swap { return absl::DataLossError("x"); })
          .code(),
      absl::StatusCode::kDataLoss);
  AppendMore(*sequence, stamps, 14);
  EXPECT_EQ(View(*sequence).lanes[1].resolved.segments, 1u);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "packed 64");
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// ---- Concurrent operations

TEST_F(Recode, RowsThatComeMeanwhileStayBehind) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 70);
  ASSERT_TRUE(sequence
                  ->Recode({.lane = 0}, Into(sequence, Quarter(), 32,
                                             [&](const OpenRun&) {
                                               AppendMore(*sequence, stamps, 20);
                                               EXPECT_EQ(Shown(*sequence, stamps), "");
                                             }))
                  .ok());
  EXPECT_EQ(Forms(*sequence), "packed 32, packed 32, plain 6, plain 20");
  EXPECT_EQ(Shown(*sequence, stamps), "");
  AppendMore(*sequence, stamps, 9);
  EXPECT_EQ(Forms(*sequence), "packed 32, packed 32, plain 6, plain 29");
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "packed 32, packed 64, plain 3");
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// Any cut, with and without new rows after it, of new segments and of a growing one.
TEST_F(Recode, WhatIsCutOffMeanwhileStaysOff) {
  for (int round = 0; round < 60; ++round) {
    const auto sequence = world_.NewSequence(worker_->session(), *small_);
    Stamps stamps;
    if (random_.OneIn(2)) {
      stamps = Fill(*sequence, 64);
      ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
    }
    AppendMore(*sequence, stamps, random_.Between(1, 150));
    const std::uint64_t cut = random_.Between(0, stamps.size());
    const absl::Status status =
        sequence->Recode({.lane = 0}, Into(sequence, Quarter(), 64, [&](const OpenRun&) {
                           ASSERT_TRUE(sequence->Truncate(cut).ok());
                           stamps.resize(cut);
                           if (random_.OneIn(2)) Collect();
                           if (random_.OneIn(2))
                             AppendMore(*sequence, stamps, random_.Between(1, 40));
                           EXPECT_EQ(Shown(*sequence, stamps), "");
                         }));
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    ASSERT_EQ(Shown(*sequence, stamps), "") << "cut to " << cut;
    for (int more = 0; more < 3; ++more) {
      AppendMore(*sequence, stamps, random_.Between(1, 80));
      ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
      ASSERT_EQ(Shown(*sequence, stamps), "");
    }
    ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
  }
}

TEST_F(Recode, AForkMeanwhileHasWhatWasThere) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 80);
  std::shared_ptr<Sequence> child;
  ASSERT_TRUE(sequence
                  ->Recode({.lane = 0}, Into(sequence, Quarter(), kMaxSegmentEntries,
                                             [&](const OpenRun&) {
                                               child = *world_.tenant().Fork(worker_->session(),
                                                                             sequence->id());
                                             }))
                  .ok());
  EXPECT_EQ(Forms(*sequence), "packed 64, plain 16");
  EXPECT_EQ(Forms(*child), "plain 80");
  Stamps childs = stamps;
  AppendMore(*sequence, stamps, 50);
  AppendMore(*child, childs, 50);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  ASSERT_TRUE(RecodeAll(child, Quarter()).ok());
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(Shown(*child, childs), "");
}

// A swap may mark a sequence as packed by a call, outside of its policy. A failed swap does not.
TEST_F(Recode, OnlyWhatIsSwappedInIsMadeByHand) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Fill(*sequence, 80);
  std::shared_ptr<Sequence> child;
  const auto swap = [&](const std::function<void()>& meanwhile) {
    return sequence->Recode({.lane = 0, .whole = true}, [&](const OpenRun& run) -> Swap {
      meanwhile();
      return LaneSwap{.whole = true, .held = run.plain, .by_hand = true};
    });
  };
  EXPECT_TRUE(absl::IsAborted(swap([&] { ASSERT_TRUE(sequence->Truncate(70).ok()); })));
  EXPECT_FALSE(sequence->has_manual_changes());
  EXPECT_TRUE(
      swap([&] { child = *world_.tenant().Fork(worker_->session(), sequence->id()); }).ok());
  EXPECT_TRUE(sequence->has_manual_changes());
  EXPECT_FALSE(child->has_manual_changes());
}

// A segment shared with a fork does not grow.
TEST_F(Recode, AForkMeanwhileEndsTheGrowth) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 64);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  AppendMore(*sequence, stamps, 40);
  Collect();
  const std::uint64_t tiles = Used(pool::MemoryTag::kTiles);
  std::shared_ptr<Sequence> child;
  EXPECT_EQ(sequence
                ->Recode({.lane = 0}, Into(sequence, Quarter(), kMaxSegmentEntries,
                                           [&](const OpenRun& run) {
                                             EXPECT_TRUE(run.grows);
                                             child = *world_.tenant().Fork(worker_->session(),
                                                                           sequence->id());
                                           }))
                .code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), tiles);
  EXPECT_EQ(Forms(*sequence), "packed 64, plain 40");
  Stamps childs = stamps;
  AppendMore(*child, childs, 30);
  for (const auto& each : {sequence, child}) ASSERT_TRUE(RecodeAll(each, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "packed 64, packed 32, plain 8");
  EXPECT_EQ(Forms(*child), "packed 64, packed 64, plain 6");
  AppendMore(*sequence, stamps, 24);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "packed 64, packed 64");
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(Shown(*child, childs), "");
}

TEST_F(Recode, ASequenceThatIsFreedMeanwhileTakesNothingWithIt) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Fill(*sequence, 70);
  EXPECT_EQ(sequence
                ->Recode({.lane = 0}, Into(sequence, Quarter(), 32,
                                           [&](const OpenRun&) {
                                             Collect();
                                             ASSERT_TRUE(
                                                 world_.tenant().FreeSequence(sequence->id()).ok());
                                             Collect();
                                           }))
                .code(),
            absl::StatusCode::kNotFound);
  Collect();
  EXPECT_EQ(world_.tenant().pool().used_bytes(), 0u);
  EXPECT_EQ(sequence->OpenEntries(0), 0u);
  EXPECT_EQ(RecodeAll(sequence, Quarter()).code(), absl::StatusCode::kNotFound);
}

TEST_F(Recode, LanesAreRecodedBesideEachOtherAndOneLaneByOneCaller) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  const Stamps stamps = Fill(*sequence, 64);
  ASSERT_TRUE(
      sequence
          ->Recode(
              {.lane = 0},
              Into(sequence, Quarter(), 64,
                   [&](const OpenRun&) {
                     EXPECT_TRUE(
                         absl::IsAborted(sequence->Recode({.lane = 0}, Into(sequence, Quarter()))));
                     EXPECT_TRUE(absl::IsAborted(
                         sequence->Pack(All(*small_, Quarter()), Proceed).status()));
                     EXPECT_TRUE(sequence->Recode({.lane = 1}, Into(sequence, Quarter())).ok());
                   }))
          .ok());
  EXPECT_TRUE(View(*sequence).segments[1].shape.packed());
  EXPECT_EQ(Shown(*sequence, stamps), "");
  // Nor while all of them are being packed.
  const auto other = world_.NewSequence(worker_->session(), *small_);
  Fill(*other, 64);
  EXPECT_TRUE(other
                  ->Pack(All(*small_, Quarter()),
                         [&] {
                           EXPECT_TRUE(
                               absl::IsAborted(other->Recode({.lane = 0}, Into(other, Quarter()))));
                           return absl::OkStatus();
                         })
                  .ok());
}

// A packing replaces the growing segment, or adds one after it.
TEST_F(Recode, APackingEndsTheGrowth) {
  kernels::TileShape quest = kernels::DenseShape(64, kernels::ElementType::kBf16);
  quest.summary = kernels::Summary::kMinMax;
  quest.block = 16;
  for (const kernels::TileShape& packed : {quest, Quarter()}) {
    const auto sequence = world_.NewSequence(worker_->session(), *small_);
    Stamps stamps = Fill(*sequence, 64);
    ASSERT_TRUE(RecodeAll(sequence, quest).ok());
    AppendMore(*sequence, stamps, 10);
    ASSERT_TRUE(sequence->Pack(All(*small_, packed), Proceed).ok());
    AppendMore(*sequence, stamps, 40);
    ASSERT_TRUE(RecodeAll(sequence, packed).ok());
    EXPECT_EQ(View(*sequence).lanes[0].resolved.segments, 4u);
    EXPECT_EQ(Shown(*sequence, stamps), "");
  }
}

TEST_F(Recode, SegmentsThatStayPlainAreNotAppendedToNorTaken) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 40);
  ASSERT_TRUE(sequence
                  ->Recode({.lane = 0},
                           [](const OpenRun& run) -> Swap {
                             run.plain.front().segment->SealDense();
                             return std::nullopt;
                           })
                  .ok());
  EXPECT_EQ(sequence->OpenEntries(0), 0u);
  AppendMore(*sequence, stamps, 40);
  EXPECT_EQ(Forms(*sequence), "plain 40, plain 40");
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "plain 40, packed 32, plain 8");
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// ---- Provisional segments

// The provisional segments are those with raw rows, up to the last one without.
TEST_F(Recode, ProvisionalSegmentsAreReplacedAsAWhole) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 64);
  const auto provisionally = [&](const OpenRun& run) -> Swap {
    const Rows rows = Plain(*sequence, run);
    auto raw = std::make_shared<RawRows>(rows.tile, sequence->memory().raw_copies);
    const std::uint64_t tiles = rows.count / kTileEntries;
    EXPECT_TRUE(raw->Put(0, rows.keys.data(), rows.values.data(), tiles).ok());
    auto segment = std::make_shared<Segment>(
        Quarter(), run.first_position + run.provisional_entries(), nullptr, raw);
    std::vector<device::WordStore> words;
    EXPECT_TRUE(
        ReserveTiles(sequence->memory(), static_cast<std::uint32_t>(32 * tiles), *segment, words)
            .ok());
    EXPECT_TRUE(EncodeRows(sequence->memory(), {Quarter(), nullptr}, rows.From(0, 32 * tiles),
                           segment->Places())
                    .ok());
    EXPECT_TRUE(sequence->memory().device->StoreWords(words).ok());
    return LaneSwap{.segments = {std::move(segment)}, .growing = true};
  };
  ASSERT_TRUE(sequence->Recode({.lane = 0}, provisionally).ok());
  AppendMore(*sequence, stamps, 32);
  ASSERT_TRUE(sequence->Recode({.lane = 0}, provisionally).ok());
  AppendMore(*sequence, stamps, 20);
  EXPECT_EQ(Forms(*sequence), "packed 64, packed 32, plain 20");
  EXPECT_EQ(sequence->OpenEntries(0), 116u);
  ASSERT_TRUE(sequence->Truncate(70).ok());  // into the second segment
  stamps.resize(70);
  AppendMore(*sequence, stamps, 20);
  EXPECT_EQ(Forms(*sequence), "packed 64, packed 6, plain 20");

  const auto child = *world_.tenant().Fork(worker_->session(), sequence->id());
  ASSERT_TRUE(sequence
                  ->Recode({.lane = 0},
                           [&](const OpenRun& run) -> Swap {
                             EXPECT_EQ(run.provisional_entries(), 70u);
                             EXPECT_EQ(run.plain_entries(), 20u);
                             EXPECT_EQ(run.first_position, 0u);
                             EXPECT_FALSE(run.grows);
                             Rows rows = Plain(*sequence, run);
                             Rows all = {.tile = rows.tile, .count = 90};
                             all.keys.resize(70 * rows.tile.row_bytes());
                             all.values.resize(all.keys.size());
                             std::size_t at = 0;
                             for (const HeldSegment& held : run.provisional) {
                               EXPECT_TRUE(held.segment->raw()->CopyTo(
                                   held.entries, all.keys.data() + at, all.values.data() + at));
                               at += held.entries * rows.tile.row_bytes();
                             }
                             all.keys.insert(all.keys.end(), rows.keys.begin(), rows.keys.end());
                             all.values.insert(all.values.end(), rows.values.begin(),
                                               rows.values.end());
                             kernels::TileShape half = Quarter();
                             half.key.kept = half.value.kept = 32;
                             auto segment = Encode(*sequence, half, all, 0, 90, 0);
                             EXPECT_TRUE(segment.ok());
                             return LaneSwap{.all = true, .segments = {*std::move(segment)}};
                           })
                  .ok());
  EXPECT_EQ(Forms(*sequence), "packed 90");
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(sequence->OpenEntries(0), 0u);
  EXPECT_EQ(child->OpenEntries(0), 90u);
  EXPECT_EQ(Shown(*child, stamps), "");
  // Raw rows dropped by one sequence are also gone from the other.
  ASSERT_TRUE(child
                  ->Recode({.lane = 0},
                           [&](const OpenRun& run) -> Swap {
                             run.provisional.back().segment->raw()->Drop();
                             return std::nullopt;
                           })
                  .ok());
  EXPECT_EQ(child->OpenEntries(0), 20u);
}

// ---- Lack of memory

class RecodeShort : public Recode {
 protected:
  static constexpr std::uint64_t kLimit = 4 << 20;
  pool::Charge Squeeze(World& world, std::uint64_t bytes) {
    auto& account = const_cast<pool::Account&>(world.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - bytes);
  }
};

TEST_F(RecodeShort, EveryAllocationThatFailsChangesNothing) {
  World world({.tenant_limit = kLimit, .device = &device_});
  const auto model = world.Register(SmallModel("one", 1, 1));
  const auto session = world.OpenSession();
  for (const bool grows : {false, true}) {
    const auto sequence = world.NewSequence(*session, *model);
    Stamps stamps = NewStamps(8 * 32);
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    if (grows) {
      ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
      const Stamps more = NewStamps(100);
      ASSERT_TRUE(AppendAll(*sequence, stamps.size(), more).ok());
      stamps.insert(stamps.end(), more.begin(), more.end());
    }
    int refused = 0;
    for (std::uint64_t room = 0;; room += 64) {
      world.tenant().epochs().Collect();
      const std::uint64_t used = world.tenant().account().used_bytes();
      absl::Status status;
      {
        const pool::Charge rest = Squeeze(world, room);
        status = sequence->Recode({.lane = 0}, Into(sequence, Quarter(), 128));
      }
      const auto view = ReadSequence(world.tenant(), *sequence);
      ASSERT_TRUE(view.ok());
      ASSERT_EQ(PackedDiffers(*view, *model, {stamps}), "") << room;
      if (status.ok()) break;
      ++refused;
      ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      ASSERT_EQ(world.tenant().account().used_bytes(), used) << status;
      ASSERT_LT(room, kLimit);
    }
    EXPECT_GT(refused, 3);
    world.Validate();
  }
  world.tenant().EndSession(session->id());
}

}  // namespace
}  // namespace tessera::cache
