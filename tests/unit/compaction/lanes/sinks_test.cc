// Policies that keep the first tokens of a lane dense.

#include <algorithm>
#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using kernels::kTileEntries;
using testing::ElementsAre;

class SinksTest : public CompactorTest {
 protected:
  static policies::Policy Keeping(std::uint64_t sinks, std::uint64_t recent = 0) {
    policies::Policy policy = SmallMosaic();
    policy.text += " " + std::to_string(sinks) + " " + std::to_string(recent);
    policy.mosaic->segments.sinks = sinks;
    policy.mosaic->segments.recent = recent;
    return policy;
  }
  // The least position, of all lanes, that a packed entry stands at.
  std::uint64_t FirstPacked(const Track& track) {
    const cache::SequenceView view = View(track);
    std::uint64_t least = ~std::uint64_t{0};
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        if (segment.shape.packed()) least = std::min(least, segment.first_position);
      }
    }
    return least;
  }
};

TEST_F(SinksTest, TheFirstTileOfAPromptStaysDense) {
  for (const std::uint64_t sinks : {1, 4, 32}) {
    Track track = NewTrack(Keeping(sinks));
    Append(track, 288, 1, /*end_of_prompt=*/true);
    RunAll();
    EXPECT_THAT(FormsOf(track), ElementsAre("plain: 32", "16 kept: 256"));
    EXPECT_EQ(Shown(track), "");
    // Asking again changes nothing.
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_THAT(FormsOf(track), ElementsAre("plain: 32", "16 kept: 256"));
  }
  Track track = NewTrack(Keeping(33));
  Append(track, 288, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_THAT(FormsOf(track), ElementsAre("plain: 64", "16 kept: 224"));
  EXPECT_EQ(Shown(track), "");
}

TEST_F(SinksTest, TheirBytesCount) {
  std::uint64_t bytes[2];
  for (const std::uint64_t sinks : {0, 4}) {
    Track track = NewTrack(Keeping(sinks));
    Append(track, 256, 1, /*end_of_prompt=*/true);
    RunAll();
    bytes[sinks / 4] = Used(pool::MemoryTag::kTiles);
    const cache::SequenceView view = View(track);
    std::uint64_t sum = 0;
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        sum += cache::Tiles::PoolBytes(segment.shape,
                                       (segment.entries + kTileEntries - 1) / kTileEntries);
      }
    }
    EXPECT_EQ(bytes[sinks / 4], sum);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    RunAll();
  }
  EXPECT_GT(bytes[1], bytes[0]);
}

// With nothing to pack there is nothing to set apart.
TEST_F(SinksTest, ARunThatPacksNothingStaysWhole) {
  Track track = NewTrack(Keeping(4));
  Append(track, 20, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_THAT(FormsOf(track), ElementsAre("plain: 20"));
  Append(track, 20, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(FirstPacked(track), ~std::uint64_t{0});
  EXPECT_EQ(Shown(track), "");
  Append(track, 280, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(FirstPacked(track), 32u);
  EXPECT_EQ(Shown(track), "");
}

// They do not count in the shortest segment.
TEST_F(SinksTest, DecodedTokensAreSealedBehindThem) {
  Track track = NewTrack(Keeping(4));
  for (std::uint64_t tokens = 32; tokens <= 64; tokens += 32) {
    Decode(track, 32, 1);
    RunAll();
    EXPECT_EQ(FirstPacked(track), ~std::uint64_t{0}) << tokens;
  }
  Decode(track, 64, 1);
  RunAll();
  EXPECT_EQ(FirstPacked(track), 32u);
  EXPECT_EQ(Shown(track), "");
}

TEST_F(SinksTest, ForksShareThemAndCutsKeepThem) {
  Track track = NewTrack(Keeping(4));
  Append(track, 288, 1, /*end_of_prompt=*/true);
  RunAll();
  const std::uint64_t used = Used(pool::MemoryTag::kTiles);
  Track fork = Fork(track);
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), used);
  // Below the end of the sinks: what comes is a sink again, up to the end of their tile.
  Truncate(fork, 20);
  EXPECT_EQ(Shown(fork), "");
  Append(fork, 300, 2, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(FirstPacked(fork), 32u);
  EXPECT_EQ(Shown(fork), "");
  EXPECT_EQ(Shown(track), "");
}

// Forks that wait with the same rows get the same segments, the dense one among them.
TEST_F(SinksTest, WhatForksWaitWithIsSealedOnce) {
  Track track = NewTrack(Keeping(4));
  Append(track, 288, 1);
  Track fork = Fork(track);
  const auto one = Compress(track);
  const auto other = Compress(fork);
  RunAll();
  ExpectTold(*one);
  ExpectTold(*other);
  EXPECT_THAT(FormsOf(fork), ElementsAre("plain: 32", "16 kept: 256"));
  const kernels::SegmentView& sinks = View(track).segments[0];
  EXPECT_EQ(sinks.tile_offsets[0], View(fork).segments[0].tile_offsets[0]);
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(Shown(fork), "");
}

// Whatever happens, the first tokens are as they came, and what is shown is right.
TEST_F(SinksTest, AnyTimeInALife) {
  for (int round = 0; round < 6; ++round) {
    const std::uint64_t sinks = random_.Between(1, 70);
    Track track = NewTrack(Keeping(sinks, random_.OneIn(2) ? random_.Between(1, 100) : 0));
    for (int i = 0; i < 20; ++i) {
      switch (random_.Below(5)) {
        case 0:
          Append(track, random_.Between(1, 300), random_.Below(3), random_.OneIn(2));
          break;
        case 1:
          Decode(track, random_.Between(1, 100), random_.Below(3));
          break;
        case 2:
          if (!track.stamps.empty() && random_.OneIn(3)) {
            Truncate(track, random_.Between(1, track.stamps.size()));
          }
          break;
        case 3: {
          Track fork = Fork(track);
          ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
          track = std::move(fork);
          break;
        }
        default:
          compactor_.Appended(track.sequence,
                              {.layers = 1, .end_of_prompt = true, .until = track.stamps.size()});
      }
      RunAll();
      ASSERT_EQ(Shown(track), "") << "round " << round << ", step " << i;
      ASSERT_GE(FirstPacked(track), (sinks + kTileEntries - 1) / kTileEntries * kTileEntries)
          << "round " << round << ", step " << i;
    }
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    RunAll();
  }
}

}  // namespace
}  // namespace tessera::compaction
