// Rows in planes: which rows are coded and when, that the codes are near the rows, and what later
// operations do to them.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/segment/book_shelf.h"
#include "daemon/cache/sequence/join.h"
#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/aligned_bytes.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr const char* kPlanes = "planes:book_rows=256,recent=64";

class Planes : public CompactorTest {
 protected:
  // The world keeps its models, and with them their books.
  void TearDown() override {
    world_.tenant().memory().books->Drop(model_->id());
    CompactorTest::TearDown();
  }

  Track Compressed(std::uint64_t tokens, const std::string& policy = kPlanes) {
    Track track = NewTrack(*policies::ParsePolicy(policy));
    Append(track, tokens, 1);
    CompressAll(track);
    return track;
  }
  void CompressAll(Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  Forms Expected(std::vector<std::pair<std::string, std::uint64_t>> parts) {
    Forms forms;
    for (const auto& [form, entries] : parts) forms.push_back(Concat(form, ": ", entries));
    return forms;
  }

  // Sums over the rows of one side.
  struct Sums {
    double error = 0;
    double energy = 0;
  };
  static void AddRow(const float* shown, const std::byte* row, std::uint32_t dim, Sums& sums) {
    for (std::uint32_t d = 0; d < dim; ++d) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, row + 2 * d, 2);
      const double exact = kernels::Bf16ToFloat(bits);
      sums.error += (shown[d] - exact) * (shown[d] - exact);
      sums.energy += exact * exact;
    }
  }
  // Empty if all lanes show the track's rows: dense ones exactly, coded ones within `share` of
  // their energy.
  std::string Near(const Track& track, double share = 0.02) {
    const cache::SequenceView view = View(track);
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t token = 0;
      for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
        Sums keys, values;
        for (std::uint32_t tile = 0; tile * 32 < segment.entries; ++tile) {
          AddTile(track, lane, segment, tile, token, keys, values);
        }
        const double most = segment.shape.planes() ? share : 0;
        if (keys.error > most * keys.energy || values.error > most * values.energy) {
          return Concat("layer ", lane.layer, ", head ", lane.kv_head, ", segment ", i,
                        ": key error ", keys.error, " of ", keys.energy, ", value error ",
                        values.error, " of ", values.energy);
        }
        token += segment.entries;
      }
      if (token != lane.resolved.tail_start) return "entries are missing";
    }
    return "";
  }
  // Empty if every index of signs is that of the track's rows, coded anew with the same book.
  std::string IndexProblem(const Track& track) {
    const kernels::Operations& operations = kernels::OperationsOf(cache::ReferenceKernels());
    const cache::SequenceView view = View(track);
    std::uint64_t indexed = 0;
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t token = 0;
      for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
        const bool signs = segment.shape.summary == kernels::Summary::kSigns;
        for (std::uint32_t tile = 0; signs && tile * 32 < segment.entries; ++tile) {
          const std::uint32_t rows = std::min(32u, segment.entries - tile * 32);
          if (rows < 32) continue;  // the last tile of a cut segment indexes more rows
          if (!HasIndexOf(operations, track, lane, segment, tile, token + tile * 32)) {
            return Concat("layer ", lane.layer, ", segment ", i, ", tile ", tile);
          }
          indexed += rows;
        }
        token += segment.entries;
      }
    }
    return indexed > 0 ? "" : "no row has an index";
  }
  bool HasIndexOf(const kernels::Operations& operations, const Track& track,
                  const cache::SequenceView::LaneOf& lane, const kernels::SegmentView& segment,
                  std::uint32_t tile, std::uint64_t first) {
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    kernels::AlignedBytes keys(32 * dense.row_bytes()), values(32 * dense.row_bytes());
    for (std::uint32_t i = 0; i < 32; ++i) {
      const std::uint64_t stamp = track.stamps[first + i];
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense,
              keys.data() + i * dense.row_bytes());
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense,
              values.data() + i * dense.row_bytes());
    }
    kernels::AlignedBytes prepared(operations.prepared_bytes(segment.shape, dense.type));
    operations.prepare_encode(segment.shape, dense.type, segment.rotation, prepared.data());
    kernels::AlignedBytes to(layout.bytes), index(layout.summary_bytes);
    EXPECT_TRUE(operations.encode({.key = keys.data(),
                                   .value = values.data(),
                                   .stride = dense.row_bytes(),
                                   .type = dense.type,
                                   .rows = 32,
                                   .weights = nullptr,
                                   .positions = nullptr,
                                   .shape = segment.shape,
                                   .layout = layout,
                                   .prepared = prepared.data(),
                                   .tile = to.data(),
                                   .summaries = index.data()}));
    return std::memcmp(index.data(), segment.arena + segment.summary_offsets[tile],
                       layout.summary_bytes) == 0;
  }
  void AddTile(const Track& track, const cache::SequenceView::LaneOf& lane,
               const kernels::SegmentView& segment, std::uint32_t tile, std::uint64_t first,
               Sums& keys, Sums& values) {
    const kernels::Operations& operations = kernels::OperationsOf(cache::ReferenceKernels());
    const std::uint32_t dim = segment.shape.head_dim;
    const std::uint32_t rows = std::min(32u, segment.entries - tile * 32);
    std::vector<float> decoded[2] = {std::vector<float>(32 * dim), std::vector<float>(32 * dim)};
    std::vector<float> shown[2] = {std::vector<float>(32 * dim), std::vector<float>(32 * dim)};
    operations.decode({.tile = segment.arena + segment.tile_offsets[tile],
                       .shape = segment.shape,
                       .layout = kernels::LayoutOf(segment.shape),
                       .rows = rows,
                       .padded_channels = dim,
                       .keys = decoded[0].data(),
                       .values = decoded[1].data()});
    for (const bool value : {false, true}) {
      const kernels::RotationView& book = segment.rotation;
      if (!segment.shape.planes()) {
        shown[value] = decoded[value];
        continue;
      }
      operations.unrotate({.rotation = value ? book.value : book.key,
                           .rotation_type = book.type,
                           .channels = dim,
                           .head_dim = dim,
                           .rows = decoded[value].data(),
                           .padded_channels = dim,
                           .row_count = rows,
                           .output = shown[value].data(),
                           .mean = value ? book.value_mean : book.key_mean});
    }
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    std::vector<std::byte> row(dense.row_bytes());
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::uint64_t stamp = track.stamps[first + tile * 32 + i];
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense, row.data());
      AddRow(shown[0].data() + i * dim, row.data(), dim, keys);
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense, row.data());
      AddRow(shown[1].data() + i * dim, row.data(), dim, values);
    }
  }
};

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
