// Rows in planes: which rows are coded and when, that the codes are near the rows, and what later
// operations do to them.

#include <algorithm>
#include <string>
#include <vector>

#include "tests/unit/compaction/lanes/planes_fixture.h"

namespace tessera::compaction {
namespace {

TEST_F(Planes, SignsIndexDenseRowsWithoutChangingThem) {
  Track track = Compressed(1300, "signs");
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 32}, {"summed up", 1120}, {"plain", 148}}));
  EXPECT_EQ(Near(track), "");
  EXPECT_EQ(IndexProblem(track), "");
  Decode(track, 70, 1);
  RunAll();
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 32}, {"summed up", 1184}, {"plain", 128}}));
  Track child = Fork(track);
  Truncate(child, 800);
  Append(child, 400, 1);
  CompressAll(child);
  EXPECT_EQ(Near(child), "");
  EXPECT_EQ(IndexProblem(child), "");
  EXPECT_EQ(IndexProblem(track), "");
}

TEST_F(Planes, SignsIndexPlanes) {
  Track track = Compressed(700, Concat(kPlanes, "+signs"));
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 32}, {"64 kept", 576}, {"plain", 92}}));
  EXPECT_EQ(Near(track), "");
  EXPECT_EQ(IndexProblem(track), "");
  const auto described = track.sequence->Describe(/*lanes=*/true);
  const cache::SegmentRun& run = described.lanes.front().runs[1];
  EXPECT_EQ(run.shape.summary, kernels::Summary::kSigns);
  EXPECT_EQ(run.summary_bytes % 64, 0u);
  EXPECT_GE(run.summary_bytes, 576u * (model_->geometry(0).head_dim / 16 + 1));
  EXPECT_LT(run.summary_bytes, run.tile_bytes);
  for (int round = 0; round < 6; ++round) {
    Decode(track, random_.Between(1, 90), 1);
    RunAll();
    ASSERT_EQ(IndexProblem(track), "");
  }
}

TEST_F(Planes, JoinedSegmentsKeepTheirIndex) {
  Track track = Compressed(500, Concat(kPlanes, "+signs"));
  for (int fork = 0; fork < 5; ++fork) {
    Track child = Fork(track);
    Append(child, 100, 1);
    CompressAll(child);
    track = std::move(child);
  }
  const std::size_t before = FormsOf(track).size();
  const absl::Status joined =
      track.sequence->Recode({.lane = 0, .whole = true}, [&](const cache::OpenRun& run) {
        return cache::JoinShortSegments(track.sequence->memory(), run);
      });
  ASSERT_TRUE(joined.ok()) << joined;
  EXPECT_LT(FormsOf(track).size(), before);
  EXPECT_EQ(Near(track), "");
  EXPECT_EQ(IndexProblem(track), "");
}

TEST_F(Planes, AreMadeOfAllButSinksAndNewest) {
  Track track = Compressed(500);
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 32}, {"64 kept", 384}, {"plain", 84}}));
  EXPECT_EQ(Near(track), "");
  const cache::SequenceView view = View(track);
  EXPECT_TRUE(view.segments[1].shape.planes());
  EXPECT_EQ(RawBytes(), 0u) << "rows are coded once, for good";
}

TEST_F(Planes, WaitForRowsToMakeABookFrom) {
  Track track = Compressed(300);
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 300}}));
  Append(track, 60, 1);
  CompressAll(track);
  EXPECT_EQ(FormsOf(track), Expected({{"plain", 32}, {"64 kept", 256}, {"plain", 72}}));
  EXPECT_EQ(Near(track), "");
}

TEST_F(Planes, LaterSequencesUseTheBookThatIsThere) {
  Track first = Compressed(400);
  const std::uint64_t books = Used(pool::MemoryTag::kRotations);
  EXPECT_GT(books, 0u);
  Track second = Compressed(200);
  EXPECT_EQ(FormsOf(second), Expected({{"plain", 32}, {"64 kept", 96}, {"plain", 72}}));
  EXPECT_EQ(Near(second), "");
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), books);
  EXPECT_EQ(counters().strategies_made, model_->lanes());
}

TEST_F(Planes, AnotherNumberOfPlanesHasABookOfItsOwn) {
  Compressed(400);
  const std::uint64_t books = Used(pool::MemoryTag::kRotations);
  Track track = Compressed(400, "planes:small,book_rows=256,recent=64");
  EXPECT_EQ(Near(track, 0.1), "");
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * books);
}

TEST_F(Planes, DecodedTokensJoinTheSegment) {
  Track track = Compressed(400);
  for (int round = 0; round < 8; ++round) {
    Decode(track, random_.Between(1, 90), 1);
    RunAll();
    ASSERT_EQ(Near(track), "");
    const Forms forms = FormsOf(track);
    ASSERT_EQ(forms.size(), 3u) << forms.back();
  }
}

TEST_F(Planes, ForksAndCutsKeepThem) {
  Track parent = Compressed(400);
  Track child = Fork(parent);
  Truncate(child, 201);
  EXPECT_EQ(Near(child), "");
  Append(child, 150, 1);
  Decode(parent, 100, 1);
  RunAll();
  CompressAll(child);
  EXPECT_EQ(Near(child), "");
  EXPECT_EQ(Near(parent), "");
}

// Rows of one tile that the codes would represent badly.
TEST_F(Planes, ATileThatDoesNotFitStaysDense) {
  Track track = Compressed(400, "planes:small,book_rows=256,recent=64");
  Stamps stamps = DrawTokens(320, 1);
  // Of another subspace than the book's: most of these rows are refused, and one is enough.
  std::ranges::copy(DrawTokens(8, 9), stamps.begin() + 100);
  AppendStamps(track, stamps);
  CompressAll(track);
  EXPECT_EQ(Near(track), "");
  std::uint64_t dense = 0;
  const cache::SequenceView view = View(track);
  const cache::SequenceView::LaneOf& lane = view.lanes.front();
  for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
    const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
    if (!segment.shape.planes()) dense += segment.entries;
  }
  EXPECT_EQ(dense, 32u + 32 + 80) << "sinks, the tile, the newest";
}

TEST_F(Planes, ASegmentCanHaveABookOfItsOwn) {
  constexpr const char* kOwn = "planes:book=own,book_rows=256,recent=64";
  Track first = Compressed(400, kOwn);
  const std::uint64_t books = Used(pool::MemoryTag::kRotations);
  EXPECT_GT(books, 0u);
  EXPECT_EQ(Near(first), "");
  Track second = Compressed(400, kOwn);
  EXPECT_EQ(Near(second), "");
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * books);
  // Decoded tokens join the segment, under its book.
  Decode(first, 90, 1);
  RunAll();
  EXPECT_EQ(FormsOf(first).size(), 3u);
  EXPECT_EQ(Near(first), "");
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * books);
  // A fork's rows cannot join: they wait until they are enough for a book.
  Track child = Fork(first);
  Append(child, 200, 1);
  CompressAll(child);
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * books);
  Append(child, 200, 1);
  CompressAll(child);
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 3 * books);
  EXPECT_EQ(Near(child), "");
}

// Rows that change get a new version of the book as soon as there are enough to make it from;
// segments keep the one they were coded with.
TEST_F(Planes, DriftMakesANewVersionOfTheBook) {
  Track track = Compressed(400);
  const std::uint64_t books = Used(pool::MemoryTag::kRotations);
  Append(track, cache::kDriftRows, 9);  // of another subspace than the book's
  CompressAll(track);
  EXPECT_EQ(counters().strategies_made, model_->lanes());
  // Others use the book meanwhile.
  Track other = Compressed(200);
  EXPECT_EQ(FormsOf(other), Expected({{"plain", 32}, {"64 kept", 96}, {"plain", 72}}));
  const std::uint64_t before = FormsOf(track).size();
  Append(track, 128, 9);
  CompressAll(track);
  EXPECT_EQ(counters().strategies_made, model_->lanes()) << "too few rows";
  Append(track, 256, 9);
  CompressAll(track);
  EXPECT_EQ(counters().strategies_made, 2 * model_->lanes());
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 2 * books);
  EXPECT_EQ(FormsOf(track).size(), before + 1);
  EXPECT_EQ(Near(track), "");
  EXPECT_EQ(Near(other), "");
}

TEST_F(Planes, RowsLikeTheBooksDoNotDrift) {
  Track track = Compressed(400);
  Append(track, 2 * cache::kDriftRows, 1);
  CompressAll(track);
  Append(track, 400, 1);
  CompressAll(track);
  EXPECT_EQ(counters().strategies_made, model_->lanes());
}

TEST_F(Planes, ABookThatTheDaemonDoesNotHaveIsRefused) {
  Track track = NewTrack(policies::Policy());
  const absl::Status refused =
      compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy("planes:book=papers"));
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(refused.message(),
            "planes: this daemon has no book papers; it has none. Load its file with --book, or "
            "use book=auto");
}

TEST_F(Planes, OtherPoliciesTakeOver) {
  Track track = Compressed(400);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, SmallMosaic()).ok());
  Append(track, 300, 1);
  CompressAll(track);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, *policies::ParsePolicy(kPlanes)).ok());
  Append(track, 300, 1);
  CompressAll(track);
  const cache::SequenceView view = View(track);
  EXPECT_TRUE(view.segments[1].shape.planes());
}

}  // namespace
}  // namespace tessera::compaction
