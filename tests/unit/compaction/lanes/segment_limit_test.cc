// A lane that has as many segments as a snapshot lists: it goes on, and at nobody's cost.

#include "proto/shm/layout.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kCut = 32;
// As many as seals make, 64 fewer than a snapshot lists, and one that grows behind them.
constexpr std::uint32_t kMostSegments = shm::kMaxSegments - 63;

class SegmentLimit : public CompactorTest {
 protected:
  // One lane alone, which has enough to do.
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

  // Each kind of row loses much with the strategy of the one before: a cut is always wanted.
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

  // The budget of raw copies is the neighbour's.
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
