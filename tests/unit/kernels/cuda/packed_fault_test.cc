// Invalid packed segments: offsets outside the pool, unsupported shapes, arbitrary tiles, and
// launches captured with smaller limits.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/cuda/common/lane_index.h"
#include "tests/unit/kernels/cuda/packed_problem.h"

namespace tessera::tests {
namespace {

using kernels::DenseShape;
using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::TileShape;
using kernels::ValueType;
using namespace kernels::cuda;  // NOLINT: a test file

constexpr std::uint64_t kFaultExtentBytes = 1 << 20;

// One launch over one lane, whose image may be corrupted first.
class Launch {
 public:
  Launch(const SegmentShape& shape, TestRandom& random)
      : geometry_(Geometry(ElementType::kBf16, shape.tile.head_dim, 1, 2)),
        problem_(geometry_, true, random),
        seed_(random.Bits()) {
    problem_.AddSeen(shape);
    const HostBatch batch = {.geometry = geometry_, .items = problem_.items()};
    HostBatchImage image(batch, kFaultExtentBytes);
    const auto copy = [](std::span<const std::byte> bytes) {
      AlignedBytes copied(bytes.size() + 1);
      std::copy(bytes.begin(), bytes.end(), copied.data());
      return copied;
    };
    pool_ = copy(image.pool());
    queries_ = copy(image.queries());
    EXPECT_EQ(image.WriteStep(reinterpret_cast<std::uint64_t>(pool_.data()), 0), StepStatus::kOk);
    step_ = copy(image.step());
    limits = image.limits();
  }

  StepStrategy& strategy() {
    return const_cast<StepStrategy&>(StepReader(step_.data()).strategy(0, 0));
  }
  std::uint64_t Run() {
    AlignedBytes scratch(AttendScratchBytes(geometry_, limits));
    AlignedBytes output(2 * geometry_.head_dim * sizeof(float));
    std::uint64_t fault = kNoFault;
    EmulateAttend({.geometry = geometry_,
                   .limits = limits,
                   .step = step_.data(),
                   .query = queries_.data(),
                   .output = output.data(),
                   .scratch = scratch.data(),
                   .scratch_bytes = scratch.size(),
                   .fault = &fault},
                  {.seed = seed_});
    return fault;
  }

  StepLimits limits;

 private:
  LayerGeometry geometry_;
  MixedProblem problem_;
  std::uint64_t seed_;
  AlignedBytes pool_{0}, queries_{0}, step_{0};
};

TEST(PackedFault, BadTilesAreReportedAndNotFollowed) {
  TestRandom random;
  for (const std::uint64_t offset :
       {~std::uint64_t{0}, std::uint64_t{1} << 40, std::uint64_t{8}, ~std::uint64_t{63}}) {
    MixedProblem problem(Geometry(ElementType::kBf16, 64, 2, 2), true, random);
    const SegmentShape shape = Packed(ValueType::kInt8, 64, 2, 64, 16, 600);
    problem.Add({shape}, 5, 1, 0);
    problem.Add({shape, shape}, 5, 1, 1);
    problem.items()[1].first_query_position = problem.lane(1).view().tail.end;  // sees all of it
    problem.lane(1).segment(1).offsets()[random.Below(19)] = offset;
    const std::uint64_t fault = problem.Run({.seed = random.Bits()});
    ASSERT_NE(fault, kNoFault);
    EXPECT_EQ(FaultWord::Kind(fault), FaultKind::kBadTile);
    EXPECT_EQ(FaultWord::Lane(fault), 3u);  // sequence 1, kv head 1
    problem.ExpectItemRight(0);             // the neighbour's result is complete
  }
}

TEST(PackedFault, BadRotationsAreReportedAndNotFollowed) {
  TestRandom random;
  const SegmentShape shape = Packed(ValueType::kBf16, 64, 2, 48, 16, 70);
  EXPECT_EQ(Launch(shape, random).Run(), kNoFault);
  for (const std::uint64_t offset : {std::uint64_t{1} << 40, std::uint64_t{kFaultExtentBytes + 8},
                                     2 * kFaultExtentBytes - 64, std::uint64_t{0}}) {
    for (const bool value : {false, true}) {
      Launch launch(shape, random);
      StepStrategy& strategy = launch.strategy();
      (value ? strategy.value_rotation : strategy.key_rotation) = offset;
      EXPECT_EQ(launch.Run(), FaultWord::Pack(FaultKind::kBadTile, 0, 0)) << offset << value;
    }
  }
}

TEST(PackedFault, TilesOfAnotherHeadDimAreReported) {
  TestRandom random;
  Launch launch(Packed(ValueType::kBf16, 64, 2, 64, 16, 70), random);
  launch.strategy().shape.head_dim = 128;
  EXPECT_EQ(launch.Run(), FaultWord::Pack(FaultKind::kBadTile, 0, 0));
}

TEST(PackedFault, ALaunchMadeForLessIsReported) {
  TestRandom random;
  const SegmentShape shape = Packed(ValueType::kFp8, 64, 2, 64, 16, 70);
  {
    Launch launch(shape, random);
    launch.limits.strategies = 0;
    EXPECT_EQ(FaultWord::Kind(launch.Run()), FaultKind::kBadStep);
  }
  {
    Launch launch(shape, random);
    launch.limits.kinds &= ~KindBit(PartKind::kPackedFp8);
    EXPECT_EQ(FaultWord::Kind(launch.Run()), FaultKind::kBadStep);
  }
}

// Memory after a revoked pin: the result is arbitrary, but no access is out of bounds.
TEST(PackedFault, TilesOfAnyBytesDoNoHarm) {
  TestRandom random;
  for (const ValueType values :
       {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8, ValueType::kFp8}) {
    for (const std::uint32_t group : {1u, 2u, 4u}) {
      MixedProblem problem(Geometry(ElementType::kBf16, 64, 1, 2), true, random);
      SegmentShape shape = Packed(values, 64, group, 64, 64 - 4 * group, 64);
      shape.tile.weights = shape.tile.positions = true;
      problem.AddSeen(shape);
      for (std::uint32_t t = 0; t < 2; ++t) {
        std::byte* tile = problem.lane(0).segment(0).tile(t);
        for (std::uint32_t i = 0; i < problem.lane(0).segment(0).layout().bytes; ++i) {
          tile[i] = t == 0 ? std::byte{0xff} : static_cast<std::byte>(random.Bits());
        }
      }
      EXPECT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
    }
  }
}

class PackedWriter : public ::testing::Test {
 protected:
  StepStatus Write(const SegmentSpec& segment, std::uint32_t strategies = 1) {
    const StepShape shape = {
        .batch = 1, .layers = 1, .lanes = 1, .segments = 1, .extents = 1, .strategies = strategies};
    AlignedBytes image(StepBytes(shape));
    StepWriter writer({image.data(), StepBytes(shape)}, shape);
    const std::uint64_t base = 0x10000;
    writer.SetExtents({&base, 1}, kFaultExtentBytes);
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane({&segment, 1}, {});
    limits_ = {};
    writer.Widen(limits_);
    return writer.Finish();
  }
  StepLimits limits_;
};

TEST_F(PackedWriter, RefusesWhatNoKernelMayFollow) {
  const TileShape whole = Packed(ValueType::kInt8, 128, 2, 128, 32, 1).tile;
  const TileShape cut = Packed(ValueType::kInt8, 128, 2, 96, 32, 1).tile;
  EXPECT_EQ(Write({.entries = 40, .shape = whole}), StepStatus::kOk);
  EXPECT_EQ(limits_.strategies, 1u);
  EXPECT_EQ(limits_.kinds, KindBit(PartKind::kDense) | KindBit(PartKind::kPackedInt8));
  EXPECT_EQ(Write({.entries = 40, .shape = whole}, 0), StepStatus::kIncomplete);
  EXPECT_EQ(Write({.entries = 40, .shape = cut}), StepStatus::kBadSegment);  // without a rotation
  SegmentSpec rotated = {
      .entries = 40, .shape = cut, .key_rotation = 64, .value_rotation = 128 << 10};
  EXPECT_EQ(Write(rotated), StepStatus::kOk);
  for (const std::uint64_t bad :
       {std::uint64_t{32}, kFaultExtentBytes, kFaultExtentBytes - 64, ~std::uint64_t{63}}) {
    SegmentSpec spoilt = rotated;
    spoilt.key_rotation = bad;
    EXPECT_EQ(Write(spoilt), StepStatus::kBadSegment) << bad;
    spoilt = rotated;
    spoilt.value_rotation = bad;
    EXPECT_EQ(Write(spoilt), StepStatus::kBadSegment) << bad;
  }
  rotated.rotation_type = static_cast<ElementType>(9);
  EXPECT_EQ(Write(rotated), StepStatus::kBadSegment);
  TileShape odd = whole;
  odd.value.kept = 31;
  EXPECT_EQ(Write({.entries = 40, .shape = odd}), StepStatus::kBadSegment);
  odd = whole;
  odd.group = 3;
  EXPECT_EQ(Write({.entries = 40, .shape = odd}), StepStatus::kBadSegment);
}

TEST_F(PackedWriter, PlainSegmentsTakeNoStrategy) {
  EXPECT_EQ(Write({.entries = 40, .shape = DenseShape(128, ElementType::kBf16)}, 0),
            StepStatus::kOk);
  EXPECT_EQ(limits_.strategies, 0u);
  TileShape words = DenseShape(128, ElementType::kBf16);
  words.weights = true;
  EXPECT_EQ(Write({.entries = 40, .shape = words}, 0), StepStatus::kIncomplete);
  EXPECT_EQ(Write({.entries = 40, .shape = words}), StepStatus::kOk);
  EXPECT_EQ(limits_.kinds, KindBit(PartKind::kDense) | KindBit(PartKind::kDenseWords));
}

}  // namespace
}  // namespace tessera::tests
