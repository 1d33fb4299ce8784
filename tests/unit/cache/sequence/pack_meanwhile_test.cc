// Packing concurrent with all other operations on a sequence: no token is lost, and no reader sees
// an intermediate state.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/cache/segment/pack.h"
#include "gtest/gtest.h"
#include "tests/unit/cache/sequence/pack_fixture.h"

namespace tessera::cache {
namespace {

using PackMeanwhile = PackFixture;

TEST_F(PackMeanwhile, WhatHappensMeanwhileIsNotLost) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 100);
  std::shared_ptr<Sequence> child;
  const Stamps at_fork = stamps;
  const absl::StatusOr<PackOutcome> outcome =
      sequence->Pack(All(*small_, Quarter()), [&]() -> absl::Status {
        EXPECT_EQ(sequence->Pack(All(*small_, Quarter()), Proceed).status().code(),
                  absl::StatusCode::kAborted);
        child = *world_.tenant().Fork(worker_->session(), sequence->id());
        EXPECT_TRUE(sequence->Truncate(77).ok());
        stamps.resize(77);
        AppendMore(*sequence, stamps, 30);
        EXPECT_EQ(Shown(*sequence, stamps), "");
        return absl::OkStatus();
      });
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->entries_packed, 4u * 77);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(Shown(*child, at_fork), "");
  const SequenceView view = View(*sequence);
  EXPECT_EQ(view.lanes[0].resolved.segments, 2u);
  EXPECT_TRUE(view.segments[0].shape.packed());
  EXPECT_FALSE(View(*child).segments[0].shape.packed());
}

TEST_F(PackMeanwhile, TailsGoOnMeanwhile) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 40);
  const TestWorker::OpenTail tail = *worker_->Open(*sequence);
  const auto decode = [&](std::uint64_t tokens) {
    for (const std::uint64_t stamp : NewStamps(tokens)) {
      worker_->Write(*sequence, tail, stamps.size(), stamp);
      stamps.push_back(stamp);
    }
    worker_->Commit(tail, stamps.size());
  };
  decode(35);
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 24u);  // up to token 64
  ASSERT_TRUE(sequence
                  ->Pack(All(*small_, Quarter()),
                         [&]() -> absl::Status {
                           decode(40);
                           EXPECT_EQ(*sequence->AbsorbFullTiles(), 32u);
                           return absl::OkStatus();
                         })
                  .ok());
  EXPECT_TRUE(sequence->decoding());
  EXPECT_EQ(Shown(*sequence, stamps), "");
  decode(30);
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 32u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  const SequenceView view = View(*sequence);
  EXPECT_EQ(view.lanes[0].resolved.segments, 2u);
  EXPECT_EQ(view.segments[0].entries, 64u);
}

TEST_F(PackMeanwhile, ASequenceThatIsFreedMeanwhileTakesNothingWithIt) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Fill(*sequence, 100);
  const absl::Status status = sequence
                                  ->Pack(All(*small_, Quarter()),
                                         [&] {
                                           Collect();
                                           return world_.tenant().FreeSequence(sequence->id());
                                         })
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  Collect();
  EXPECT_EQ(world_.tenant().pool().used_bytes(), 0u);
}

TEST_F(PackMeanwhile, WorkThatNobodyWantsLeavesEverythingAsItWas) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 100);
  const std::uint64_t used = world_.tenant().account().used_bytes();
  const absl::Status status =
      sequence->Pack(All(*small_, Quarter()), [] { return absl::CancelledError("gone"); }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_EQ(world_.tenant().account().used_bytes(), used);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  // Its lanes can be appended to and packed as before.
  AppendMore(*sequence, stamps, 3);
  EXPECT_EQ(View(*sequence).lanes[0].resolved.segments, 1u);
  EXPECT_TRUE(sequence->Pack(All(*small_, Quarter()), Proceed).ok());
}

TEST_F(PackMeanwhile, ReadersThatLookedBeforeKeepWhatTheySaw) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  const Stamps stamps = Fill(*sequence, 90);
  const std::uint64_t dense = Used(pool::MemoryTag::kTiles);
  std::optional<Tenant::Reader> pinned(std::in_place, world_.tenant());
  const SequenceView before = View(*sequence);
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(All(*small_, Quarter()), Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  Collect();
  EXPECT_EQ(PackedDiffers(before, *small_, std::vector<Stamps>(2, stamps)), "");
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), dense + outcome->tile_bytes_after);
  EXPECT_GE(world_.tenant().epochs().waiting_bytes(), dense);
  pinned.reset();
  Collect();
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), outcome->tile_bytes_after);
}

TEST_F(PackMeanwhile, AnyOrderOfChangesShowsEveryTokenOnce) {
  struct Track {
    std::shared_ptr<Sequence> sequence;
    Stamps stamps;
  };
  const auto mixed = world_.Register(MixedModel("mixed", kernels::ElementType::kBf16));
  for (int story = 0; story < 3; ++story) {
    const auto& model = random_.OneIn(2) ? mixed : small_;
    std::vector<Track> tracks;
    for (int move = 0; move < 60; ++move) {
      if (tracks.empty()) tracks.push_back({world_.NewSequence(worker_->session(), *model), {}});
      Track& track = random_.Pick(tracks);
      switch (random_.Below(6)) {
        case 0:
        case 1:
          AppendMore(*track.sequence, track.stamps, random_.Between(1, 40));
          break;
        case 2: {
          const std::uint32_t first = static_cast<std::uint32_t>(random_.Below(model->layers()));
          const auto layers =
              static_cast<std::uint32_t>(random_.Between(1, model->layers() - first));
          const TestPacking packing = RandomPacking(random_, *model, first, layers);
          const auto outcome = track.sequence->Pack(packing.spec, Proceed);
          ASSERT_TRUE(outcome.ok()) << outcome.status();
          break;
        }
        case 3: {
          const std::uint64_t keep = random_.Between(0, track.stamps.size());
          ASSERT_TRUE(track.sequence->Truncate(keep).ok());
          track.stamps.resize(keep);
          break;
        }
        case 4:
          if (tracks.size() < 4) {
            tracks.push_back(
                {*world_.tenant().Fork(worker_->session(), track.sequence->id()), track.stamps});
          }
          break;
        default:
          if (tracks.size() > 2) {
            ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
            track = std::move(tracks.back());
            tracks.pop_back();
          }
          Collect();
      }
      world_.Validate();
      for (const Track& each : tracks) ASSERT_EQ(Shown(*each.sequence, each.stamps), "") << move;
    }
    for (const Track& each : tracks) {
      ASSERT_TRUE(world_.tenant().FreeSequence(each.sequence->id()).ok());
    }
    Collect();
    EXPECT_EQ(world_.tenant().pool().used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace tessera::cache
