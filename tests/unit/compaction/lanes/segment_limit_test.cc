// A lane with as many segments as a snapshot can list continues to work, at no cost to others.

#include "proto/shm/layout.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kCut = 32;
// The maximum that seals create, 64 below what a snapshot lists, plus a growing segment.
constexpr std::uint32_t kMostSegments = shm::kMaxSegments - 63;

class SegmentLimit : public CompactorTest {
 protected:
  // A single lane, which has enough work.
  SegmentLimit() : CompactorTest(4 << 20) {
    model_ = world_.Register(cache::SmallModel("one", 1, 1));
  }

  std::uint32_t SegmentsOf(const Track& track) {
    return track.sequence->Describe(true).lanes[0].segments;
  }
};

TEST_F(SegmentLimit, ALaneThatReachedItGrowsOnAndKeepsNoRawCopies) {
  policies::Policy often = SmallMosaic();
  often.mosaic->segments = {
      .tokens = kCut, .min_tokens = kCut, .sinks = 0, .recent = 0, .loss_window = kCut};
  Track track = NewTrack(often);
  const std::uint64_t nearly = (kMostSegments - 4) * kCut;
  while (track.stamps.size() < nearly) {
    Append(track, std::min<std::uint64_t>(nearly - track.stamps.size(), 8192), 1);
    RunAll();
  }
  const std::shared_ptr<Told> told = Compress(track);
  RunAll();
  ExpectTold(*told);
  ASSERT_EQ(SegmentsOf(track), kMostSegments - 4);

  // Each kind of rows loses much under the previous kind's strategy, so every change is a cut.
  for (int i = 0; i < 12; ++i) {
    Decode(track, kCut, 1 + i % 3);
    RunAll();
    ASSERT_LE(SegmentsOf(track), kMostSegments);
  }
  EXPECT_EQ(SegmentsOf(track), kMostSegments);
  EXPECT_EQ(RawBytes(), 0u);
  EXPECT_GT(counters().raw_rows_dropped.load(), 0u);
  EXPECT_EQ(track.sequence->OpenEntries(0), 0u) << "rows wait for a segment that nobody can make";
  const std::uint64_t decoded = track.stamps.size();
  const std::shared_ptr<Told> again = Compress(track);
  RunAll();
  ExpectTold(*again);
  EXPECT_EQ(track.sequence->Describe(true).lanes[0].tokens, decoded);
  EXPECT_EQ(Shown(track), "");

  // The neighbour uses up the budget of raw copies.
  Track other = NewTrack(SmallMosaic());
  Append(other, 256, 1, true);
  RunAll();
  for (int i = 0; i < 3; ++i) {
    Decode(other, 32, 2);
    RunAll();
  }
  EXPECT_GT(RawBytes(), 0u);
  EXPECT_EQ(Shown(other), "");
}

}  // namespace
}  // namespace tessera::compaction
