// Segments that change their form: their rows afterwards, and their memory.

#include "daemon/cache/segment/pack.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/cache/sequence/pack_fixture.h"

namespace tessera::cache {
namespace {

using kernels::kTileEntries;
using kernels::Summary;
using kernels::TileShape;
using kernels::ValueType;
using testing::HasSubstr;

using Pack = PackFixture;

TEST_F(Pack, EveryTileIsWhatTheKernelsMakeOfItsRows) {
  const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                        kernels::ElementType::kFp32};
  for (int round = 0; round < 12; ++round) {
    const kernels::ElementType type = random_.Pick(types);
    const std::string of_type = kernels::ElementName(type);
    const auto model =
        world_.Register(random_.OneIn(2) ? MixedModel("mixed " + of_type, type)
                                         : SmallModel("alike " + of_type, 2, 2, type));
    const auto sequence = world_.NewSequence(worker_->session(), *model);
    const Stamps stamps = Fill(*sequence, random_.Between(1, 150));
    const TestPacking packing = RandomPacking(random_, *model, 0, model->layers());
    const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    const std::uint64_t entries = stamps.size() * model->lanes();
    EXPECT_EQ(outcome->entries_packed, entries);
    EXPECT_EQ(outcome->entries_left, 0u);
    EXPECT_EQ(Shown(*sequence, stamps), "");

    const SequenceView view = View(*sequence);
    for (const SequenceView::LaneOf& lane : view.lanes) {
      ASSERT_EQ(lane.resolved.segments, 1u);
      const kernels::SegmentView& segment = view.segments[lane.first_segment];
      EXPECT_EQ(segment.shape, packing.spec.shapes[lane.layer]);
      EXPECT_EQ(segment.rotation.key != nullptr, packing.spec.key_rotations != nullptr);
      const kernels::DenseTile dense = model->layout().tile(lane.layer);
      const TileEncoder encoder(segment.shape, segment.rotation, type);
      // Whole tiles here: summaries, and zeros after the last row.
      for (std::uint32_t first = 0; first < segment.entries; first += kTileEntries) {
        const std::uint32_t rows = std::min(kTileEntries, segment.entries - first);
        std::vector<std::byte> key(rows * dense.row_bytes()), value(key.size());
        for (std::uint32_t r = 0; r < rows; ++r) {
          MakeRow(stamps[first + r], {lane.layer, lane.kv_head, RowKind::kKey}, dense,
                  key.data() + r * dense.row_bytes());
          MakeRow(stamps[first + r], {lane.layer, lane.kv_head, RowKind::kValue}, dense,
                  value.data() + r * dense.row_bytes());
        }
        const std::vector<std::byte> tile =
            encoder.Tile(key.data(), value.data(), dense.row_bytes(), rows);
        const std::uint32_t bytes = kernels::LayoutOf(segment.shape).bytes;
        ASSERT_EQ(std::memcmp(segment.arena + segment.tile_offsets[first / kTileEntries],
                              tile.data(), bytes),
                  0);
        ASSERT_TRUE(HasSummaries(segment, first / kTileEntries, tile.data() + bytes));
      }
    }
    Collect();
    EXPECT_EQ(outcome->tile_bytes_after, sequence->Describe(false).tile_bytes);
    EXPECT_EQ(Used(pool::MemoryTag::kTiles), outcome->tile_bytes_after);
    EXPECT_EQ(Used(pool::MemoryTag::kRotations), outcome->rotation_bytes);
    ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
    Collect();
  }
}

// The figures of the paper: D = 128, a quarter of the channels in bf16, blocks of 8.
TEST_F(Pack, APromptOfOneSegmentTakes171BytesPerToken) {
  ModelSpec spec = {.name = "published"};
  spec.layers = {{.query_heads = 1, .kv_heads = 1, .head_dim = 128}};
  const auto model = world_.Register(spec);
  const auto sequence = world_.NewSequence(worker_->session(), *model);
  Fill(*sequence, kMaxSegmentEntries);
  ASSERT_EQ(Used(pool::MemoryTag::kTiles), 512u * kMaxSegmentEntries);
  TestPacking packing;
  packing.spec.shapes = {Quarter(128)};
  packing.spec.shapes[0].summary = Summary::kMean;
  packing.spec.shapes[0].block = 8;
  packing.key = RandomRotations(random_, 1, 128, 128, kernels::ElementType::kBf16);
  packing.value = RandomRotations(random_, 1, 128, 128, kernels::ElementType::kBf16);
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  Collect();
  const std::uint64_t tiles = Used(pool::MemoryTag::kTiles);
  const std::uint64_t rotations = Used(pool::MemoryTag::kRotations);
  std::printf("per token: %g B of tiles, %g B of rotations; %g B of tile tables beside them\n",
              static_cast<double>(tiles) / kMaxSegmentEntries,
              static_cast<double>(rotations) / kMaxSegmentEntries,
              static_cast<double>(Used(pool::MemoryTag::kTables)) / kMaxSegmentEntries);
  EXPECT_EQ(tiles + rotations, 171u * kMaxSegmentEntries);
  EXPECT_EQ(outcome->tile_bytes_before, 512u * kMaxSegmentEntries);
  EXPECT_EQ(outcome->tile_bytes_after, tiles);
  EXPECT_EQ(outcome->rotation_bytes, rotations);
}

TEST_F(Pack, SegmentsOfALaneShareTheirRotationsAndLanesDoNot) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 70);
  {
    const Tenant::Reader pinned(world_.tenant());  // so that the cut segment is not reopened
    ASSERT_TRUE(sequence->Truncate(40).ok());
    stamps.resize(40);
    AppendMore(*sequence, stamps, 10);
  }
  TestPacking packing;
  packing.spec.shapes.assign(2, Quarter());
  packing.key = RandomRotations(random_, 4, 64, 64, kernels::ElementType::kBf16);
  packing.value = RandomRotations(random_, 4, 64, 64, kernels::ElementType::kBf16);
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(outcome->rotation_bytes, 4u * 2 * 64 * 64 * 2);
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), outcome->rotation_bytes);
  const SequenceView view = View(*sequence);
  for (const SequenceView::LaneOf& lane : view.lanes) {
    ASSERT_EQ(lane.resolved.segments, 2u);
    const kernels::RotationView& first = view.segments[lane.first_segment].rotation;
    EXPECT_EQ(first.key, view.segments[lane.first_segment + 1].rotation.key);
    // Each lane has its own matrices, in the order of the tensor.
    const std::size_t matrix = 64 * 64 * 2;
    const std::size_t at = (lane.layer * 2 + lane.kv_head) * matrix;
    EXPECT_EQ(std::memcmp(first.key, packing.key.data() + at, matrix), 0);
    EXPECT_EQ(std::memcmp(first.value, packing.value.data() + at, matrix), 0);
  }
  // Rotations are freed with the last segment that uses them.
  ASSERT_TRUE(sequence->Truncate(0).ok());
  Collect();
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), 0u);
}

// Offset 0 means "no rotations" to a reader, and the pool's first block may be free.
TEST_F(Pack, RotationsNeverLieAtTheBeginningOfThePool) {
  const auto first = world_.NewSequence(worker_->session(), *small_);
  Fill(*first, 1);
  ASSERT_EQ(View(*first).segments[0].tile_offsets[0], 0u);
  ModelSpec wide = SmallModel("wide", 1, 1);
  wide.layers[0].head_dim = 128;
  const auto model = world_.Register(wide);
  const auto sequence = world_.NewSequence(worker_->session(), *model);
  const Stamps stamps = Fill(*sequence, 40);
  ASSERT_TRUE(world_.tenant().FreeSequence(first->id()).ok());
  Collect();  // its slab is used next
  TestPacking packing;
  packing.spec.shapes = {Quarter(128)};
  packing.key = RandomRotations(random_, 1, 128, 128, kernels::ElementType::kBf16);
  packing.value = packing.key;
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  ASSERT_TRUE(sequence->Pack(packing.spec, Proceed).ok());
  const SequenceView view = View(*sequence);
  EXPECT_NE(view.segments[0].rotation.key, nullptr);
  EXPECT_EQ(view.segments[0].rotation.key - view.segments[0].arena, 65536);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Pack, WhatIsPackedIsLeftAndWhatIsAppendedIsDense) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 50);
  ASSERT_TRUE(sequence->Pack(All(*small_, Quarter()), Proceed).ok());
  AppendMore(*sequence, stamps, 20);
  SequenceView view = View(*sequence);
  ASSERT_EQ(view.lanes[0].resolved.segments, 2u);
  EXPECT_EQ(view.segments[1].shape, kernels::DenseShape(64, kernels::ElementType::kBf16));
  EXPECT_EQ(Shown(*sequence, stamps), "");
  AppendMore(*sequence, stamps, 5);  // into the same dense segment
  EXPECT_EQ(View(*sequence).lanes[0].resolved.segments, 2u);

  TileShape half = Quarter();
  half.key.kept = half.value.kept = 32;
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(All(*small_, half), Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->entries_packed, 4u * 25);
  EXPECT_EQ(outcome->entries_left, 4u * 50);
  view = View(*sequence);
  EXPECT_EQ(view.segments[0].shape, Quarter());
  EXPECT_EQ(view.segments[1].shape, half);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  // Nothing is left to do: nothing changes, and readers need not resolve again.
  const absl::StatusOr<PackOutcome> idle = sequence->Pack(All(*small_, half), Proceed);
  ASSERT_TRUE(idle.ok());
  EXPECT_EQ(idle->entries_packed, 0u);
  EXPECT_EQ(idle->entries_left, 4u * 75);
}

TEST_F(Pack, DenseRowsWithSummariesAreSealedAndMayBePackedLater) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 45);
  TileShape quest = kernels::DenseShape(64, kernels::ElementType::kBf16);
  quest.summary = Summary::kMinMax;
  quest.block = 16;
  ASSERT_TRUE(sequence->Pack(All(*small_, quest), Proceed).ok());
  AppendMore(*sequence, stamps, 10);
  EXPECT_EQ(View(*sequence).lanes[0].resolved.segments, 2u);
  EXPECT_EQ(View(*sequence).segments[0].entries, 45u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(All(*small_, Quarter()), Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->entries_packed, 4u * 55);
  EXPECT_EQ(View(*sequence).segments[0].shape, Quarter());
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Pack, OnlyTheLayersThatAreNamedChange) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  const Stamps stamps = Fill(*sequence, 33);
  const PackSpec second = {.first_layer = 1, .shapes = {Quarter()}};
  const absl::StatusOr<PackOutcome> outcome = sequence->Pack(second, Proceed);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->entries_packed, 2u * 33);
  const SequenceView view = View(*sequence);
  EXPECT_FALSE(view.segments[0].shape.packed());
  EXPECT_FALSE(view.segments[1].shape.packed());
  EXPECT_TRUE(view.segments[2].shape.packed());
  EXPECT_TRUE(view.segments[3].shape.packed());
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Pack, AForkPacksForItselfAlone) {
  const auto parent = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*parent, 60);
  const auto child = *world_.tenant().Fork(worker_->session(), parent->id());
  ASSERT_TRUE(child->Pack(All(*small_, Quarter()), Proceed).ok());
  EXPECT_TRUE(View(*child).segments[0].shape.packed());
  EXPECT_FALSE(View(*parent).segments[0].shape.packed());
  EXPECT_EQ(Shown(*parent, stamps), "");
  EXPECT_EQ(Shown(*child, stamps), "");
  // Forks share packed segments like any other.
  const std::uint64_t tiles = Used(pool::MemoryTag::kTiles);
  const auto grandchild = *world_.tenant().Fork(worker_->session(), child->id());
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), tiles);
  ASSERT_TRUE(child->Truncate(7).ok());
  EXPECT_EQ(Shown(*grandchild, stamps), "");
  Stamps cut(stamps.begin(), stamps.begin() + 7);
  AppendMore(*child, cut, 40);
  EXPECT_EQ(Shown(*child, cut), "");
}

// ---- Refusals for lack of room

TEST_F(Pack, AValueThatTheFormCannotHoldIsNamedAndTheSequenceServesOn) {
  class LargeRows final : public MadeRows {
   public:
    LargeRows(const shm::LaneLayout& layout, std::uint64_t token, bool of_value)
        : MadeRows(layout), token_(token), of_value_(of_value) {}
    void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
              std::byte* key, std::byte* value) const override {
      const kernels::DenseTile tile = layout_.tile(layer);
      std::memset(key, 0, count * tile.row_bytes());
      std::memset(value, 0, count * tile.row_bytes());
      if (layer != 1 || kv_head != 0 || token_ < first || token_ >= first + count) return;
      const std::uint16_t large = kernels::FloatToBf16(70000.0f);
      std::memcpy((of_value_ ? value : key) + (token_ - first) * tile.row_bytes() + 6, &large, 2);
    }

   private:
    const std::uint64_t token_;
    const bool of_value_;
  };
  for (const bool of_value : {false, true}) {
    const auto sequence = world_.NewSequence(worker_->session(), *small_);
    const std::uint64_t token = random_.Below(70);
    ASSERT_TRUE(sequence
                    ->Append({.first_layer = 0, .layers = 2, .first_token = 0, .tokens = 70},
                             LargeRows(small_->layout(), token, of_value))
                    .ok());
    const std::uint64_t used = world_.tenant().account().used_bytes();
    TileShape half = Quarter();
    half.format = kernels::PackedFormat(ValueType::kFp16);
    const absl::Status status = sequence->Pack(All(*small_, half), Proceed).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(AsStringView(status.message())),
                HasSubstr(Concat("layer 1, kv head 0: K or V of token ", token, " is")));
    EXPECT_FALSE(sequence->failed());
    EXPECT_EQ(world_.tenant().account().used_bytes(), used);
    EXPECT_FALSE(View(*sequence).segments[0].shape.packed());
    half.format = kernels::PackedFormat(ValueType::kInt8);
    EXPECT_TRUE(sequence->Pack(All(*small_, half), Proceed).ok());
  }
}

TEST_F(Pack, WithoutRoomForBothFormsNothingChanges) {
  TestPacking packing;
  packing.spec.shapes.assign(2, Quarter());
  packing.key = RandomRotations(random_, 4, 64, 64, kernels::ElementType::kBf16);
  packing.value = packing.key;
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  // A separate tenant, whose quota is squeezed step by step.
  World small_world(World::Options{.tenant_limit = 4 << 20, .device = &device_});
  TestWorker worker(small_world.tenant(), small_world.OpenSession());
  const auto model = small_world.Register(SmallModel("small", 2, 2));
  const auto squeezed = small_world.NewSequence(worker.session(), *model);
  const Stamps rows = NewStamps(200);
  ASSERT_TRUE(AppendAll(*squeezed, 0, rows).ok());
  auto& quota = const_cast<pool::Account&>(small_world.tenant().account());
  const std::uint64_t used = quota.used_bytes();
  int refused = 0;
  for (std::uint64_t room = 0;; room += 1 + random_.Below(2000)) {
    absl::Status status;
    {
      const pool::Charge rest =
          *quota.Reserve(pool::MemoryTag::kPoolExtents, quota.limit_bytes() - used - room);
      status = squeezed->Pack(packing.spec, Proceed).status();
    }
    small_world.Validate();
    if (status.ok()) break;
    ++refused;
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    ASSERT_EQ(quota.used_bytes(), used);
    const absl::StatusOr<SequenceView> view = ReadSequence(small_world.tenant(), *squeezed);
    ASSERT_EQ(PackedDiffers(*view, *model, std::vector<Stamps>(2, rows)), "");
    ASSERT_FALSE(view->segments[0].shape.packed());
  }
  EXPECT_GT(refused, 10);
  small_world.tenant().epochs().Collect();
  EXPECT_LT(quota.used_bytes(), used);
  small_world.tenant().EndSession(worker.session().id());
}

TEST_F(Pack, DescribeShowsFormByForm) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = Fill(*sequence, 50);
  ASSERT_TRUE(sequence->Pack(All(*small_, Quarter()), Proceed).ok());
  AppendMore(*sequence, stamps, 20);
  const Sequence::Description described = sequence->Describe(/*lanes=*/true);
  const std::vector<SegmentRun> form = sequence->Form();
  ASSERT_EQ(form.size(), 2u);
  EXPECT_EQ(form[0].shape, Quarter());
  EXPECT_EQ(form[0].segments, 4u);
  EXPECT_EQ(form[0].entries, 4u * 50);
  EXPECT_EQ(form[0].tile_bytes, 4u * 2 * kernels::LayoutOf(Quarter()).bytes);
  EXPECT_EQ(form[1].entries, 4u * 20);
  EXPECT_EQ(form[0].tile_bytes + form[1].tile_bytes, described.tile_bytes);
  ASSERT_EQ(described.lanes[3].runs.size(), 2u);
  EXPECT_EQ(described.lanes[3].runs[0].entries, 50u);
  EXPECT_EQ(described.lanes[3].entries, 70u);
}

}  // namespace
}  // namespace tessera::cache
