// Attention over lanes that mix dense and packed segments: the kernels' source on the emulated GPU,
// compared with attention by definition in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tests/unit/kernels/cuda/packed_problem.h"

namespace tessera::tests {
namespace {

using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::Summary;
using kernels::TileShape;
using kernels::ValueType;
using kernels::cuda::kNoFault;

constexpr ElementType kElementTypes[] = {ElementType::kBf16, ElementType::kFp16,
                                         ElementType::kFp32};
constexpr ValueType kValueTypes[] = {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8,
                                     ValueType::kFp8};

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

void AddRandomSummary(TileShape& shape, TestRandom& random) {
  if (random.OneIn(2)) return;
  shape.summary = random.OneIn(2) ? Summary::kMean : Summary::kMinMax;
  shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
}

SegmentShape RandomShape(const LayerGeometry& geometry, std::uint32_t most, TestRandom& random) {
  SegmentShape shape;
  const auto entries = static_cast<std::uint32_t>(random.Between(1, most));
  if (random.OneIn(3)) {
    shape = {.tile = kernels::DenseShape(geometry.head_dim, geometry.type), .entries = entries};
  } else {
    const std::uint32_t group = 1u << random.Below(3);
    const std::uint32_t all = geometry.head_dim / group;
    const auto groups = static_cast<std::uint32_t>(
        random.OneIn(2) ? all : random.Between(std::max(1u, 16 / group), all));
    const auto kept =
        static_cast<std::uint32_t>(random.OneIn(3) ? groups / 4 + 1 : random.Between(1, groups));
    shape = Packed(random.Pick(kValueTypes), geometry.head_dim, group, groups * group,
                   std::min(kept, groups) * group, entries);
    shape.rotated = groups != all || !random.OneIn(4);
    shape.rotation_type = random.Pick(kElementTypes);
    if (random.OneIn(2)) PartSides(shape, random);
  }
  shape.tile.weights = random.OneIn(2);
  shape.tile.positions = random.OneIn(2);
  AddRandomSummary(shape.tile, random);
  return shape;
}

struct Form {
  ValueType values;
  std::uint32_t head_dim;
};

class EveryForm : public ::testing::TestWithParam<Form> {};

// One lane per group size: whole and truncated rows, full parts and partial tiles.
TEST_P(EveryForm, AgreesWithTheDefinition) {
  TestRandom random;
  const std::uint32_t dim = GetParam().head_dim;
  const std::uint32_t cut = dim * 3 / 4;
  MixedProblem problem(Geometry(ElementType::kBf16, dim, 2, 4), true, random);
  for (const std::uint32_t group : {1u, 2u, 4u}) {
    problem.Add({Packed(GetParam().values, dim, group, dim, dim / 4, 530),
                 Packed(GetParam().values, dim, group, cut, cut / 8 * 4, 33)},
                40, 1, 0);
    problem.Add({Packed(GetParam().values, dim, group, dim, dim, 16),
                 Packed(GetParam().values, dim, group, 20, 4, 47)},
                0, 3, 1);
    problem.Add({Packed(GetParam().values, dim, group, group, group, 1)}, 0, 1, 1);
    // Fewer channels in keys than in values, and no bitmaps.
    SegmentShape keys_cut = Packed(GetParam().values, dim, group, cut, cut, 70);
    const auto whole = static_cast<std::uint16_t>(dim);
    keys_cut.tile.value = {whole, whole};
    problem.Add({keys_cut}, 3, 2, 0);
  }
  ASSERT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
  problem.ExpectRight();
}

std::string FormName(const ::testing::TestParamInfo<Form>& info) {
  return std::string(kernels::ValueTypeName(info.param.values)) + "_" +
         std::to_string(info.param.head_dim);
}

std::vector<Form> EveryFormThereIs() {
  std::vector<Form> forms;
  for (const ValueType values : kValueTypes) {
    for (const std::uint32_t head_dim : kernels::kHeadDims) forms.push_back({values, head_dim});
  }
  return forms;
}

INSTANTIATE_TEST_SUITE_P(Cuda, EveryForm, ::testing::ValuesIn(EveryFormThereIs()), FormName);

TEST(PackedAttend, AgreesWithTheDefinitionOnRandomLanes) {
  TestRandom random;
  for (int round = 0; round < 24; ++round) {
    const auto kv_heads = static_cast<std::uint32_t>(random.Between(1, 2));
    LayerGeometry geometry = Geometry(random.Pick(kElementTypes), random.Pick(kernels::kHeadDims),
                                      kv_heads, static_cast<std::uint32_t>(random.Between(1, 8)));
    std::vector<float> sinks(geometry.query_heads);
    for (float& sink : sinks) sink = random.OneIn(4) ? -INFINITY : Normal(random);
    if (random.OneIn(3)) geometry.sinks = sinks.data();
    if (random.OneIn(3)) geometry.logit_softcap = 2 + 3 * std::fabs(Normal(random));
    if (random.OneIn(3))
      geometry.sliding_window = static_cast<std::uint32_t>(random.Between(1, 900));
    SCOPED_TRACE(testing::Message() << "round " << round << " head_dim " << geometry.head_dim
                                    << " type " << kernels::ElementName(geometry.type));
    MixedProblem problem(geometry, !random.OneIn(3), random);
    for (std::uint64_t lane = random.Between(1, 2); lane > 0; --lane) {
      std::vector<SegmentShape> shapes;
      for (std::uint64_t s = random.Between(1, 3); s > 0; --s) {
        shapes.push_back(RandomShape(geometry, random.OneIn(4) ? 600 : 80, random));
      }
      problem.Add(shapes, static_cast<std::uint32_t>(random.Below(50)),
                  static_cast<std::uint32_t>(random.OneIn(3) ? random.Between(1, 20) : 1),
                  static_cast<std::uint32_t>(random.Below(kv_heads)));
    }
    ASSERT_EQ(problem.Run({.blocks_x = static_cast<std::uint32_t>(random.Between(1, 7)),
                           .seed = random.Bits()}),
              kNoFault);
    problem.ExpectRight();
    if (HasFatalFailure()) return;
  }
}

class EveryValueType : public ::testing::TestWithParam<ValueType> {};

// Another grid, order of threads, width of column blocks, and other queries in the call.
TEST_P(EveryValueType, BitsDependOnTheLaneAndTheQueryAlone) {
  TestRandom random;
  MixedProblem problem(Geometry(ElementType::kBf16, 64, 2, 3), true, random);
  SegmentShape words = Packed(GetParam(), 64, 1, 64, 17, 90);
  words.tile.weights = words.tile.positions = true;
  problem.Add({Packed(GetParam(), 64, 2, 48, 12, 600), words}, 20, 4, 0);
  problem.Add({Packed(GetParam(), 64, 4, 64, 16, 40)}, 5, 1, 1);
  ASSERT_EQ(problem.Run({.blocks_x = 1, .column_tiles = 1, .seed = random.Bits()}), kNoFault);
  const std::vector<float> together = problem.Results(0);
  ASSERT_EQ(problem.Run({.blocks_x = 5, .column_tiles = 2, .seed = random.Bits()}), kNoFault);
  EXPECT_TRUE(SameBits(problem.Results(0), together));
  kernels::cuda::HostItem& item = problem.items()[0];
  const kernels::cuda::HostItem all = item;
  const std::size_t row = 6 * 64;  // floats per query
  for (std::uint32_t q = 0; q < 4; ++q) {
    item.queries = 1;
    item.first_query_position = all.first_query_position + q;
    item.query = static_cast<const std::byte*>(all.query) + q * row * 2;
    ASSERT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
    const std::vector<float> alone = problem.Results(0);
    const std::span<const float> heads = std::span(alone).first(3 * 64);  // of kv head 0
    EXPECT_TRUE(SameBits(heads, std::span(together).subspan(q * row, 3 * 64))) << "query " << q;
  }
}

std::string ValueName(const ::testing::TestParamInfo<ValueType>& info) {
  return kernels::ValueTypeName(info.param);
}

INSTANTIATE_TEST_SUITE_P(Cuda, EveryValueType, ::testing::ValuesIn(kValueTypes), ValueName);

// Also in the second and third part of a segment, and for queries that see only some of each.
TEST(PackedAttend, PositionWordsCountFromTheFirstPositionOfTheSegment) {
  TestRandom random;
  for (const bool packed : {false, true}) {
    LayerGeometry geometry = Geometry(ElementType::kFp16, 64, 1, 2);
    geometry.sliding_window = 1000;
    MixedProblem problem(geometry, true, random);
    SegmentShape shape = Packed(ValueType::kFp16, 64, 2, 64, 16, 1100);
    if (!packed) shape.tile = kernels::DenseShape(64, ElementType::kFp16);
    shape.tile.positions = true;
    for (int i = 0; i < 2; ++i) problem.Add({shape}, 3, 2, 0);
    const std::uint64_t end = problem.lane(1).view().tail.end;
    problem.items()[0].first_query_position = problem.lane(0).view().tail.end;
    problem.items()[1].first_query_position = random.Between(end / 2, end);
    ASSERT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
    problem.ExpectRight();
  }
}

// Unrotated rows that keep every channel equal dense rows, up to the order of sums.
TEST(PackedAttend, RowsThatKeepEverythingAreDenseRows) {
  TestRandom random;
  MixedProblem problem(Geometry(ElementType::kBf16, 128, 1, 4), true, random);
  SegmentShape whole = Packed(ValueType::kBf16, 128, 2, 128, 128, 300);
  whole.rotated = false;
  problem.Add({whole}, 0, 1, 0);
  ASSERT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
  const std::vector<float> packed = problem.Results(0);
  problem.lane(0).MakeDense(0);
  ASSERT_EQ(problem.Run({.seed = random.Bits()}), kNoFault);
  const std::vector<float> dense = problem.Results(0);
  // A bf16 layer's query is exact in bf16, so that both forms round the same things.
  for (std::size_t i = 0; i < packed.size(); ++i) {
    if (packed[i] == dense[i]) continue;  // includes -inf of a query that sees nothing
    ASSERT_NEAR(packed[i], dense[i], 0x1p-8) << i;
  }
}

}  // namespace
}  // namespace tessera::tests
