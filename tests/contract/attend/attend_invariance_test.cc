// Which changes keep the bits of attention, which may change only its rounding, and which inputs
// are refused.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/dispatch/merge.h"
#include "tests/contract/attend/attend_conformance.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

BatchShape RandomShape(TestRandom& random) {
  constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 8};
  const std::uint32_t group = random.Pick(kGroups);
  BatchShape shape = {.geometry = {.query_heads = 2 * group,
                                   .kv_heads = 2,
                                   .head_dim = random.Pick(kHeadDims),
                                   .type = static_cast<ElementType>(random.Between(1, 3)),
                                   .scale = 0.1f}};
  shape.causal = !random.OneIn(3);
  shape.sinks = random.OneIn(2);
  if (random.OneIn(3)) shape.geometry.sliding_window = 77;
  if (random.OneIn(3)) shape.geometry.logit_softcap = 2;
  if (random.OneIn(2)) shape.output_type = shape.geometry.type;
  return shape;
}

// A few sequences, long enough for several parts.
struct Fleet {
  Fleet(const BatchShape& shape, TestRandom& random) {
    for (std::uint32_t entries : {5u, 2100u, 700u}) {
      for (int head = 0; head < 2; ++head) {
        lanes.push_back(std::make_unique<TestLane>(
            shape.Lane({entries, 33}, static_cast<std::uint32_t>(random.Below(70))), random));
      }
    }
  }
  std::vector<TestLane*> Heads(std::size_t sequence) const {
    return {lanes[2 * sequence].get(), lanes[2 * sequence + 1].get()};
  }

  std::vector<std::unique_ptr<TestLane>> lanes;
};

TEST_P(AttendConformance, SameBitsOnEveryExecutor) {
  for (ElementType type : kTypes) {
    BatchShape shape = RandomShape(random_);
    shape.geometry.type = type;
    const Fleet fleet(shape, random_);
    TestBatch batch(shape, random_);
    for (std::size_t s = 0; s < 3; ++s) batch.Add(fleet.Heads(s), 3);
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    const std::vector<std::byte> expected = batch.OutputBytes();

    batch.ExpectSameBitsOnExecutors(subject(), expected);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendConformance, SameBitsInAnyBatch) {
  for (ElementType type : kTypes) {
    BatchShape shape = RandomShape(random_);
    shape.geometry.type = type;
    const Fleet fleet(shape, random_);
    TestBatch together(shape, random_);
    for (std::size_t s = 0; s < 3; ++s) together.Add(fleet.Heads(s), 3);
    ASSERT_EQ(together.Run(subject()).status, AttendStatus::kOk);
    const std::vector<std::byte> expected = together.OutputBytes();

    together.ExpectSameBitsItemByItem(subject(), expected);
    if (HasFatalFailure()) return;
  }
}

// Queries computed one at a time give the same bits as all together.
TEST_P(AttendConformance, RowsAreIndependent) {
  if (!subject().rows_are_independent()) GTEST_SKIP() << "not promised by " << subject().name();
  for (ElementType type : kTypes) {
    BatchShape shape = RandomShape(random_);
    shape.geometry.type = type;
    const Fleet fleet(shape, random_);
    TestBatch batch(shape, random_);
    for (std::size_t s = 0; s < 3; ++s) batch.Add(fleet.Heads(s), 11);
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    const std::vector<std::byte> expected = batch.OutputBytes();

    batch.ExpectSameBitsQueryByQuery(subject(), expected);
    if (HasFatalFailure()) return;
  }
}

// The same entries in other segments and another tail give the same attention up to rounding.
TEST_P(AttendConformance, AnyCutOfTheLane) {
  BatchShape shape = RandomShape(random_);
  shape.geometry.kv_heads = 1;
  shape.geometry.query_heads /= 2;
  TestLane lane(shape.Lane({900}, 40), random_);
  for (int round = 0; round < 8; ++round) {
    std::uint32_t left = 940;
    const auto tail = static_cast<std::uint32_t>(random_.Below(200));
    left -= tail;
    std::vector<std::uint32_t> segments;
    while (left > 0) {
      const auto entries = static_cast<std::uint32_t>(random_.Between(0, left));
      segments.push_back(entries);
      left -= entries;
    }
    const auto recut = Recut(lane, segments, tail, random_);
    TestBatch batch(shape, random_);
    batch.Add({recut.get()}, 3);
    RunAndJudge(batch);
  }
}

// Partial attention over any partition of the entries, merged in any order, equals attention over
// all entries. The merged result replaces the whole one and is checked in its place.
TEST_P(AttendConformance, MergesAnyPartition) {
  for (int round = 0; round < 12; ++round) {
    BatchShape shape = RandomShape(random_);
    shape.geometry.kv_heads = 1;
    shape.geometry.query_heads /= 2;
    shape.output_type = ElementType::kFp32;
    TestLane lane(shape.Lane({300}, 40), random_);
    TestBatch whole(shape, random_);
    whole.Add({&lane}, 3);
    ASSERT_EQ(whole.Run(subject()).status, AttendStatus::kOk);
    const AttendItem& item = whole.items()[0];
    const std::uint32_t rows = 3 * shape.geometry.query_heads;

    std::vector<std::uint64_t> cuts = {0, lane.entries()};
    for (std::uint64_t n = random_.Between(0, 4); n > 0; --n) {
      cuts.push_back(random_.Below(lane.entries() + 1));  // equal cuts give empty parts
    }
    std::sort(cuts.begin(), cuts.end());

    whole.Clear();
    std::fill_n(item.lse, rows, -std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      const auto slice = Slice(lane, cuts[i], cuts[i + 1], random_);
      BatchShape slice_shape = shape;
      slice_shape.sinks = false;
      TestBatch side(slice_shape, random_);
      side.Add({slice.get()}, 3, item.first_query_position);
      side.items()[0].query = item.query;
      ASSERT_EQ(side.Run(subject()).status, AttendStatus::kOk);
      MergeOutputs({.rows = rows, .head_dim = shape.geometry.head_dim, .type = shape.output_type},
                   {.output = item.output, .lse = item.lse},
                   {.output = side.items()[0].output, .lse = side.items()[0].lse});
    }
    if (shape.sinks) {  // the sink is one more part, with its logit as lse and no value
      const Buffer zeros(rows * shape.geometry.head_dim * sizeof(float));
      std::memset(zeros.data(), 0, zeros.size());
      std::vector<float> lse(rows);
      const float* sinks = whole.batch().geometry.sinks;
      for (std::uint32_t r = 0; r < rows; ++r) lse[r] = sinks[r % shape.geometry.query_heads];
      MergeOutputs({.rows = rows, .head_dim = shape.geometry.head_dim, .type = shape.output_type},
                   {.output = item.output, .lse = item.lse},
                   {.output = zeros.data(), .lse = lse.data()});
    }
    for (std::uint32_t r = 0; r < rows; ++r) {  // nothing is visible
      if (item.lse[r] != -std::numeric_limits<float>::infinity()) continue;
      std::memset(static_cast<std::byte*>(item.output) + r * shape.geometry.head_dim * 4, 0,
                  shape.geometry.head_dim * 4);
    }
    whole.JudgeItem(subject(), 0, random_, static_cast<std::uint32_t>(cuts.size()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendConformance, RefusesTilesOutsideTheArena) {
  BatchShape shape = RandomShape(random_);
  shape.geometry.sliding_window = 0;  // a tile that no query sees is not looked up
  const std::uint64_t tile_bytes = DenseTile{shape.geometry.head_dim, shape.geometry.type}.bytes();
  const std::uint64_t max = std::numeric_limits<std::uint64_t>::max();
  Fleet fleet(shape, random_);
  TestLane& lane = *fleet.lanes[2];  // item 2
  const std::uint64_t arena = lane.segment(0).arena_bytes;
  for (std::uint64_t bad : {arena, arena - tile_bytes + 64, max, max - 63, max - tile_bytes + 1,
                            std::uint64_t{1} << 63, std::uint64_t{8}, std::uint64_t{32}}) {
    const std::size_t tile = random_.Below(lane.offsets(0).size());
    TestBatch batch(shape, random_);
    for (std::size_t s = 0; s < 3; ++s) batch.Add(fleet.Heads(s), 2);
    const std::uint64_t good = std::exchange(lane.offsets(0)[tile], bad);
    const AttendResult result = batch.Run(subject());
    lane.offsets(0)[tile] = good;
    ASSERT_EQ(result.status, AttendStatus::kBadTile) << bad;
    ASSERT_EQ(result.item, 2u);
    for (std::size_t i = 0; i < batch.items().size(); ++i) {
      if (i != 2) batch.JudgeItem(subject(), i, random_);
    }
  }
}

TEST_P(AttendConformance, RefusesLanesThatCannotBe) {
  const BatchShape shape = RandomShape(random_);
  Fleet fleet(shape, random_);
  TestLane& lane = *fleet.lanes[3];
  const LaneView sound = lane.view();
  const SegmentView sound_segment = lane.segment(0);
  for (int fault = 0; fault < 4; ++fault) {
    lane.mutable_view() = sound;
    lane.segment(0) = sound_segment;
    TailView& tail = lane.mutable_view().tail;
    if (fault == 0) tail.end = tail.begin + tail.ring_tiles * kTileEntries + 1;
    if (fault == 1) tail = {.ring = tail.ring, .ring_tiles = 0, .begin = 7, .end = 8};
    if (fault == 2) tail.begin = tail.end + 1;
    if (fault == 3) {
      lane.segment(0).shape.format = shape.geometry.type == ElementType::kBf16
                                         ? TileFormat::kDenseFp16
                                         : TileFormat::kDenseBf16;
    }
    TestBatch batch(shape, random_);
    for (std::size_t s = 0; s < 3; ++s) batch.Add(fleet.Heads(s), 2);
    const AttendResult result = batch.Run(subject());
    ASSERT_EQ(result.status, AttendStatus::kBadTile) << fault;
    ASSERT_EQ(result.item, 3u) << fault;
  }
}

}  // namespace
}  // namespace tessera::kernels
