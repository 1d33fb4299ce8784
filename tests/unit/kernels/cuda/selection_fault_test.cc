// Selection: which images the writer refuses, which faults launches report, and that arbitrary
// memory never causes an access out of bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/unit/kernels/cuda/selection_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::DenseShape;
using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::Summary;
using kernels::TileShape;
using kernels::ValueType;

constexpr StepRule kQuarter = {.rate = 0.25, .selects = 1};

TileShape Summed(TileShape shape, std::uint8_t block) {
  shape.summary = Summary::kMean;
  shape.block = block;
  return shape;
}

class SelectionWriter : public ::testing::Test {
 protected:
  // Writes an image for one sequence and one kv head.
  StepStatus Write(const std::vector<SegmentSpec>& segments, const StepRule& rule,
                   std::uint32_t selections, std::uint32_t choices) {
    const StepShape shape = {.batch = 1,
                             .layers = 1,
                             .lanes = 1,
                             .segments = static_cast<std::uint32_t>(segments.size()),
                             .extents = 1,
                             .strategies = static_cast<std::uint32_t>(segments.size()),
                             .selections = selections,
                             .choices = choices};
    image_ = std::make_unique<AlignedBytes>(StepBytes(shape));
    StepWriter writer({image_->data(), StepBytes(shape)}, shape);
    const std::uint64_t base = 0x10000;
    writer.SetExtents({&base, 1}, std::uint64_t{1} << 40);
    writer.SetSequence(0, {.queries = 1, .rule = rule});
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane(segments, {.ring = 64, .ring_tiles = 1});
    limits_ = {};
    writer.Widen(limits_);
    return writer.Finish();
  }
  std::unique_ptr<AlignedBytes> image_;
  StepLimits limits_;
};

TEST_F(SelectionWriter, CountsPiecesAndSlotsOfWhatIsSelectedFrom) {
  const TileShape plain = DenseShape(64, ElementType::kBf16);
  const std::vector<SegmentSpec> segments = {
      {.entries = 600, .shape = plain},
      {.entries = 1030, .shape = Summed(plain, 16)},
      {.entries = 0, .shape = Summed(plain, 8)},
      {.entries = 500, .shape = Summed(Packed(ValueType::kInt8, 64, 2, 64, 16, 1).tile, 8)}};
  ASSERT_EQ(Write(segments, kQuarter, 1, 2), StepStatus::kOk);
  const StepReader step(image_->data());
  EXPECT_EQ(step.works(0)[1], 2u + 1u);  // for the dense segment, and for the tail
  EXPECT_EQ(step.layer(0).selections, 1u);
  EXPECT_EQ(step.layer(0).kinds, KindBit(PartKind::kDense));
  EXPECT_EQ(step.layer(0).selected_kinds,
            KindBit(PartKind::kDenseWords) | KindBit(PartKind::kPackedInt8));
  const StepSelection& selection = step.selection(0, 0);
  EXPECT_EQ(selection.choices, 2u);
  EXPECT_EQ(selection.blocks, 65u + 63u);
  EXPECT_EQ(selection.first_forced, 0);
  EXPECT_EQ(selection.last_forced, LastForced::kYes);  // 500 is no multiple of 8
  EXPECT_EQ(step.choices(0)[1].segment, 3u);
  EXPECT_EQ(step.choices(0)[1].first_block, 65u);
  EXPECT_EQ(step.choices(0)[1].first_piece, 2u);  // 1030 entries, 1024 to a piece
  EXPECT_EQ(step.pieces(0)[1], 2u + 1u);
  // A quarter of 1530 is 383 entries, 479 with the allowed excess: two parts and a truncated one.
  EXPECT_EQ(step.slots(0)[1], 3u);
  EXPECT_EQ(step.lane(0, 0).selection, 0u);
  EXPECT_EQ(step.segments(step.lane(0, 0))[0].choice, kReadWhole);
  EXPECT_EQ(step.segments(step.lane(0, 0))[2].choice, kReadWhole);
  EXPECT_EQ(step.segments(step.lane(0, 0))[3].choice, 1u);
  EXPECT_EQ(limits_.selections, 1u);
  EXPECT_EQ(limits_.choices, 2u);
  EXPECT_EQ(limits_.blocks, 128u);
  EXPECT_EQ(limits_.pieces, 3u);
  EXPECT_EQ(limits_.slots, 3u);
}

TEST_F(SelectionWriter, WithoutARuleEverythingIsReadWhole) {
  const SegmentSpec summed = {.entries = 600,
                              .shape = Summed(DenseShape(64, ElementType::kBf16), 4)};
  ASSERT_EQ(Write({summed}, {}, 0, 0), StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).works(0)[1], 3u);
  EXPECT_EQ(StepReader(image_->data()).lane(0, 0).selection, kReadWhole);
  EXPECT_EQ(limits_.selections, 0u);
  // Nor with a rule, if there is nothing to select from.
  ASSERT_EQ(Write({{.entries = 600, .shape = DenseShape(64, ElementType::kBf16)}}, kQuarter, 0, 0),
            StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).lane(0, 0).selection, kReadWhole);
}

TEST_F(SelectionWriter, TheFirstBlockIsForcedOnlyWhereTheLaneBeginsWithOne) {
  const TileShape plain = DenseShape(64, ElementType::kBf16);
  StepRule rule = kQuarter;
  rule.first_block = 1;
  const SegmentSpec summed = {.entries = 64, .shape = Summed(plain, 16)};
  ASSERT_EQ(Write({summed}, rule, 1, 1), StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).first_forced, 1);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).last_forced, LastForced::kNo);
  const SegmentSpec odd = {.entries = 65, .shape = Summed(plain, 16)};
  ASSERT_EQ(
      Write({{.entries = 32, .shape = plain}, odd, {.entries = 1, .shape = plain}}, rule, 1, 1),
      StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).first_forced, 0);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).last_forced, LastForced::kNo);
}

TEST_F(SelectionWriter, WithoutATailTheNewestBlockIsForcedWhereTheTailCounts) {
  StepRule rule = kQuarter;
  rule.counts_tail = 1;
  const TileShape plain = DenseShape(64, ElementType::kBf16);
  const SegmentSpec full = {.entries = 64, .shape = Summed(plain, 8)};
  ASSERT_EQ(Write({full}, rule, 1, 1), StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).last_forced, LastForced::kWithoutTail);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).tail_block, 8);
  // Newer entries without summaries: they are always read.
  ASSERT_EQ(Write({full, {.entries = 32, .shape = plain}}, rule, 1, 1), StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).last_forced, LastForced::kNo);
  const SegmentSpec partial = {.entries = 65, .shape = Summed(plain, 16)};
  ASSERT_EQ(Write({full, partial}, rule, 1, 2), StepStatus::kOk);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).last_forced, LastForced::kYes);
  EXPECT_EQ(StepReader(image_->data()).selection(0, 0).tail_block, 16);
}

TEST_F(SelectionWriter, RefusesWhatDoesNotFit) {
  const SegmentSpec summed = {.entries = 64,
                              .shape = Summed(DenseShape(64, ElementType::kBf16), 16)};
  EXPECT_EQ(Write({summed}, kQuarter, 0, 1), StepStatus::kIncomplete);
  EXPECT_EQ(Write({summed, summed}, kQuarter, 1, 1), StepStatus::kIncomplete);
  SegmentSpec vast = {.entries = kMostLayerBlocks * 4, .shape = Summed(summed.shape, 4)};
  EXPECT_EQ(Write({vast}, kQuarter, 1, 1), StepStatus::kOk);
  vast.entries += 1;
  EXPECT_EQ(Write({vast}, kQuarter, 1, 1), StepStatus::kTooManyBlocks);
}

// One lane for each form that supports selection.
SegmentShape Form(int form) {
  const ElementType type = ElementType::kBf16;
  SegmentShape shape = {.tile = DenseShape(64, type), .entries = 600};
  if (form < 4) shape = Packed(static_cast<ValueType>(form + 1), 64, 2, 64, 16, 600);
  shape.tile = Summed(shape.tile, form % 2 == 0 ? 16 : 4);
  return shape;
}

TEST(SelectionFault, BadTilesAreReportedAndNotFollowed) {
  TestRandom random;
  for (int form = 0; form < 5; ++form) {
    for (const std::uint64_t offset :
         {~std::uint64_t{0}, std::uint64_t{1} << 40, std::uint64_t{8}}) {
      const LayerGeometry geometry = Geometry(ElementType::kBf16, 64, 2, 2);
      MixedProblem problem(geometry, true, random);
      problem.Add({Form(form)}, 5, 1, 0);
      problem.Add({Form(form), Form(form)}, 5, 1, 1);
      for (std::size_t s = 0; s < 2; ++s) SumUp(problem.lane(1), s);
      problem.items()[1].first_query_position = problem.lane(1).view().tail.end;
      problem.items()[1].rule = {.rate = 0.1, .selects = 1};
      RandomSegment& segment = problem.lane(1).segment(1);
      const bool of_tile = random.OneIn(2);
      (of_tile ? segment.offsets() : segment.summary_offsets())[random.Below(19)] =
          of_tile || offset != 8 ? offset : 2;  // summaries are aligned to 4 bytes
      const std::uint64_t fault = problem.Run({.seed = random.Bits()});
      EXPECT_EQ(fault, FaultWord::Pack(FaultKind::kBadTile, 0, 3));
      problem.ExpectItemRight(0);  // the neighbour's result is complete
      SelectionCall call(geometry, true, problem.items());
      EXPECT_EQ(call.Select(random.Bits()), FaultWord::Pack(FaultKind::kBadTile, 0, 3));
    }
  }
}

TEST(SelectionFault, ALaunchMadeForLessIsReported) {
  TestRandom random;
  const LayerGeometry geometry = Geometry(ElementType::kBf16, 64, 1, 2);
  MixedProblem problem(geometry, true, random);
  problem.AddSeen(Form(2));
  SumUp(problem.lane(0), 0);
  problem.items()[0].rule = kQuarter;
  const auto run = [&](auto lower) {
    SelectionCall call(geometry, true, problem.items());
    lower(call.limits);
    const std::uint64_t seed = random.Bits();
    const std::uint64_t fault = call.Attend(seed);
    if (call.limits.selections != 0) {
      EXPECT_EQ(call.Select(seed), fault);
    }
    return fault;
  };
  EXPECT_EQ(run([](StepLimits&) {}), kNoFault);
  const std::uint64_t bad = FaultWord::Pack(FaultKind::kBadStep, 0, 0);
  EXPECT_EQ(run([](StepLimits& limits) { limits.selections = 0; }), bad);
  EXPECT_EQ(run([](StepLimits& limits) { limits.choices = 0; }), bad);
  EXPECT_EQ(run([](StepLimits& limits) { limits.blocks -= 1; }), bad);
  EXPECT_EQ(run([](StepLimits& limits) { limits.pieces -= 1; }), bad);
  EXPECT_EQ(run([](StepLimits& limits) { limits.slots -= 1; }), bad);
  EXPECT_EQ(run([](StepLimits& limits) { limits.selected_kinds = 0; }), bad);
}

// Memory after a revoked pin: the result is arbitrary, but no access is out of bounds.
TEST(SelectionFault, TilesOfAnyBytesDoNoHarm) {
  TestRandom random;
  for (int round = 0; round < 40; ++round) {
    const LayerGeometry geometry = Geometry(ElementType::kBf16, random.OneIn(2) ? 64 : 128, 1, 2);
    MixedProblem problem(geometry, random.OneIn(2), random);
    problem.AddSeen(SummedShape(geometry, 300, random));
    problem.items()[0].rule = AnyStepRule(random);
    for (std::uint32_t t = 0; t < 10; ++t) {
      std::byte* tile = problem.lane(0).segment(0).tile(t);
      std::byte* summaries = problem.lane(0).segment(0).summaries(t);
      const kernels::TileLayout& layout = problem.lane(0).segment(0).layout();
      const auto any = [&] {
        return t % 2 == 0 ? std::byte{0xff} : static_cast<std::byte>(random.Bits());
      };
      for (std::uint32_t i = 0; i < layout.bytes; ++i) tile[i] = any();
      for (std::uint32_t i = 0; i < layout.summary_bytes; ++i) summaries[i] = any();
    }
    const std::uint64_t fault = problem.Run({.seed = random.Bits()});
    // Positions that do not rise may make the selection larger than its slots.
    EXPECT_TRUE(fault == kNoFault || FaultWord::Kind(fault) == FaultKind::kBadTile);
  }
}

TEST(SelectionFault, TilesOfAnotherHeadDimAreReported) {
  TestRandom random;
  const LayerGeometry geometry = Geometry(ElementType::kBf16, 64, 1, 2);
  MixedProblem problem(geometry, true, random);
  problem.AddSeen(Form(0));
  problem.items()[0].rule = kQuarter;
  SelectionCall call(geometry, true, problem.items());
  const auto& strategy = call.step().strategy(0, 0);
  const_cast<StepStrategy&>(strategy).shape.head_dim = 128;
  EXPECT_EQ(call.Attend(random.Bits()), FaultWord::Pack(FaultKind::kBadTile, 0, 0));
}

}  // namespace
}  // namespace tessera::tests
