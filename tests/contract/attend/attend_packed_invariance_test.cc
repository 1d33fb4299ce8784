// Packed lanes: which changes keep the bits, which may change only the rounding, and which inputs
// are refused.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dispatch/merge.h"
#include "tests/contract/attend/attend_conformance.h"
#include "tests/contract/attend/attend_packed_cases.h"

namespace tessera::kernels {
namespace {

// The same entries under the same strategy, cut into other segments, have the same stored rows.
TEST_P(AttendPackedConformance, AnyCutOfASegment) {
  for (int round = 0; round < 6; ++round) {
    BatchShape shape = AnyBatch(random_);
    TileShape tile = AnySegmentShape(shape, {.cut = true}, random_);
    const Strategy strategy = AnyStrategy(tile, random_);
    const SourceRows rows(shape.geometry.head_dim, shape.geometry.type, 320, Values::kNormal,
                          random_);
    SCOPED_TRACE(Describe(shape) + " over " + Describe(tile));
    const PackedLane whole(rows, 0, {{&strategy, 300}}, 20, 11, random_);
    const ExactLane exact(whole.view(), shape.geometry);
    for (int cut = 0; cut < 4; ++cut) {
      std::vector<SegmentPlan> plan;
      for (std::uint32_t left = 300; left > 0; left -= plan.back().entries) {
        plan.push_back({&strategy, static_cast<std::uint32_t>(random_.Between(0, left))});
      }
      // A cut would lose the gap before a segment's first entry, so a lane with positions is not
      // cut.
      if (tile.positions) plan = {{&strategy, 0}, {&strategy, 300}};
      const PackedLane lane(rows, 0, plan, 20, 11, random_);
      TestBatch batch(shape, random_);
      AddNewest(batch, lane, 3);
      RunAndJudge(batch);
      if (HasFatalFailure()) return;
      const ExactLane cut_lane(lane.view(), shape.geometry);
      ASSERT_EQ(cut_lane.entries().size(), exact.entries().size());
      ASSERT_EQ(DistanceOf(exact, cut_lane, shape.geometry.head_dim).relative, 0);
    }
  }
}

// Parts of a packed lane, attended separately and merged, equal the whole lane.
TEST_P(AttendPackedConformance, MergesAnyPartition) {
  for (int round = 0; round < 10; ++round) {
    BatchShape shape = AnyBatch(random_);
    shape.sinks = false;
    shape.output_type = ElementType::kFp32;
    const TileShape tile = AnySegmentShape(shape, {.cut = true, .words = false}, random_);
    const Strategy strategy = AnyStrategy(tile, random_);
    const SourceRows rows(shape.geometry.head_dim, shape.geometry.type, 220, Values::kNormal,
                          random_);
    SCOPED_TRACE(Describe(shape) + " over " + Describe(tile));
    const PackedLane lane(rows, 0, {{&strategy, 220}}, 0, 5, random_);
    TestBatch whole(shape, random_);
    AddNewest(whole, lane, 3);
    ASSERT_EQ(whole.Run(subject()).status, AttendStatus::kOk);
    whole.Judge(subject(), random_);
    const AttendItem& item = whole.items()[0];
    const std::uint32_t count = 3 * shape.geometry.query_heads;
    std::memset(item.output, 0, std::size_t{count} * shape.geometry.head_dim * sizeof(float));
    std::fill_n(item.lse, count, -std::numeric_limits<float>::infinity());
    std::uint32_t merges = 0;
    for (std::uint32_t begin = 0; begin < 220; ++merges) {
      const auto end = static_cast<std::uint32_t>(random_.Between(begin + 1, 220));
      const PackedLane side(rows, begin, {{&strategy, end - begin}}, 0, 5 + begin, random_);
      TestBatch batch(shape, random_);
      batch.AddViews({&side.view()}, 3, item.first_query_position);
      batch.items()[0].query = item.query;
      ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
      MergeOutputs({.rows = count, .head_dim = shape.geometry.head_dim, .type = ElementType::kFp32},
                   {.output = item.output, .lse = item.lse},
                   {.output = batch.items()[0].output, .lse = batch.items()[0].lse});
      begin = end;
    }
    whole.JudgeItem(subject(), 0, random_, merges);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendPackedConformance, SameBitsOnEveryExecutorAndInAnyBatch) {
  for (int round = 0; round < 5; ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture a(shape, {.cut = true, .dense = true}, {2100, 33}, 17, random_);
    const Mixture b(shape, {.cut = true, .dense = true}, {5, 70, 100}, 40, random_);
    SCOPED_TRACE(Describe(shape) + a.Describe() + b.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *a.lane, 5);
    AddNewest(batch, *b.lane, 7);
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    const std::vector<std::byte> expected = batch.OutputBytes();

    batch.ExpectSameBitsOnExecutors(subject(), expected);
    batch.ExpectSameBitsItemByItem(subject(), expected);
    if (subject().rows_are_independent()) batch.ExpectSameBitsQueryByQuery(subject(), expected);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendPackedConformance, RefusesTilesOutsideTheArena) {
  const std::uint64_t max = std::numeric_limits<std::uint64_t>::max();
  for (int round = 0; round < 12; ++round) {
    BatchShape shape = AnyBatch(random_);
    shape.geometry.sliding_window = 0;  // a tile that no query sees is not looked up
    Mixture sound(shape, {.cut = true}, {70}, 3, random_);
    Mixture mixture(shape, {.cut = true}, {70, 130}, 3, random_);
    const std::size_t s = random_.Below(2);
    const std::uint64_t arena = mixture.lane->arena_bytes();
    const std::uint64_t bytes = LayoutOf(mixture.lane->segment(s).shape).bytes;
    const std::uint64_t too_far = (arena - bytes) / 64 * 64 + 64;
    for (std::uint64_t bad : {arena, too_far, max, max - 63, std::uint64_t{8}, std::uint64_t{32}}) {
      TestBatch batch(shape, random_);
      AddNewest(batch, *sound.lane, 2);
      AddNewest(batch, *mixture.lane, 2);
      auto& offsets = mixture.lane->offsets(s);
      const std::size_t tile = random_.Below(offsets.size());
      const std::uint64_t good = std::exchange(offsets[tile], bad);
      const AttendResult result = batch.Run(subject());
      offsets[tile] = good;
      ASSERT_EQ(result.status, AttendStatus::kBadTile) << bad << mixture.Describe();
      ASSERT_EQ(result.item, 1u);
      batch.JudgeItem(subject(), 0, random_);
    }
  }
}

TEST_P(AttendPackedConformance, RefusesShapesThatCannotBe) {
  constexpr void (*kFaults[])(TileShape&) = {
      [](TileShape& s) { s.format = TileFormat{9}; },
      [](TileShape& s) { s.head_dim = s.head_dim == 64 ? 128 : 64; },
      [](TileShape& s) { s.key.channels = static_cast<std::uint16_t>(s.head_dim + 4); },
      [](TileShape& s) { s.value.channels = static_cast<std::uint16_t>(s.head_dim + 4); },
      [](TileShape& s) { s.key.kept = static_cast<std::uint16_t>(s.key.channels + s.group); },
      [](TileShape& s) { s.value.kept = static_cast<std::uint16_t>(s.value.channels + s.group); },
      [](TileShape& s) { s.key.kept = 0; },
      [](TileShape& s) { s.value.kept = 0; },
      [](TileShape& s) { s.group = 3; },
      [](TileShape& s) { s.block = 64; }};
  for (const auto fault : kFaults) {
    const BatchShape shape = AnyBatch(random_);
    Mixture mixture(shape, {}, {70}, 3, random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 2);
    fault(mixture.lane->segment(0).shape);
    const AttendResult result = batch.Run(subject());
    ASSERT_EQ(result.status, AttendStatus::kBadTile) << Describe(mixture.lane->segment(0).shape);
  }
}

// The daemon may reuse the memory of a revoked reader, whose tiles then hold anything: bitmaps with
// too many channels, any scale, any position. The output is worthless and discarded, but no read
// may pass the end of the arena, where the next page is not readable. Runs in a child process,
// which must survive, or on a device, where a fault would fail all later calls.
TEST_P(AttendPackedConformance, GarbageTilesStayInTheArena) {
  const auto attend_over_garbage = [this] {
    for (int round = 0; round < 60; ++round) {
      const BatchShape shape = AnyBatch(random_);
      const bool bare = random_.OneIn(2);  // the tile ends with its values
      Mixture mixture(shape, {.cut = true, .dense = !bare, .summary = !bare, .words = !bare},
                      {70, 10}, 0, random_);
      std::byte* arena = mixture.lane->arena();
      const bool ones = random_.OneIn(2);
      for (std::size_t i = 0; i < mixture.lane->arena_bytes(); ++i) {
        arena[i] = ones ? std::byte{0xff} : static_cast<std::byte>(random_.Bits());
      }
      TestBatch batch(shape, random_);
      AddNewest(batch, *mixture.lane, 2);
      if (batch.Run(subject()).status != AttendStatus::kOk) return false;
    }
    return true;
  };
  if (!subject().survives_fork()) {
    EXPECT_TRUE(attend_over_garbage());
    return;
  }
  EXPECT_EXIT(std::_Exit(attend_over_garbage() ? 0 : 1), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera::kernels
