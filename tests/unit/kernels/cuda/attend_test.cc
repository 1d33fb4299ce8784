// The attention kernels' source on the emulated GPU, compared with attention by definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/reference/oracle.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::tests {
namespace {

using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::cuda::FaultKind;
using kernels::cuda::FaultWord;
using kernels::cuda::HostBatch;
using kernels::cuda::HostItem;
using kernels::cuda::kNoFault;

// The result of one item: rows of all query heads, of which only its own group's are written.
struct ItemBuffers {
  std::vector<std::byte> query;
  std::vector<float> output;
  std::vector<float> lse;
};

// A batch, its lanes, and buffers for its results.
class Problem {
 public:
  Problem(const LayerGeometry& geometry, bool causal, std::uint64_t seed)
      : geometry_(geometry), causal_(causal), random_(seed) {}

  void Add(const LaneShape& shape, std::uint32_t queries, std::uint32_t kv_head) {
    const kernels::DenseTile tile = {.head_dim = geometry_.head_dim, .type = geometry_.type};
    lanes_.emplace_back(tile, shape, random_);
    ItemBuffers& buffers = buffers_.emplace_back();
    const std::uint64_t rows = std::uint64_t{queries} * geometry_.query_heads;
    buffers.query.resize(rows * tile.row_bytes());
    for (std::uint64_t r = 0; r < rows; ++r) {
      FillRow(tile, random_, buffers.query.data() + r * tile.row_bytes());
    }
    buffers.output.resize(rows * geometry_.head_dim);
    buffers.lse.resize(rows);
    const std::uint64_t tokens = lanes_.back().tokens();
    items_.push_back({.lane = &lanes_.back().view(),
                      .kv_head = kv_head,
                      .queries = queries,
                      .first_query_position = tokens > queries ? tokens - queries : 0,
                      .query = buffers.query.data(),
                      .output = buffers.output.data(),
                      .lse = buffers.lse.data()});
  }

  std::uint64_t Run(const EmulatedGrid& grid) { return Run(grid, items_); }
  std::uint64_t Run(const EmulatedGrid& grid, std::span<const HostItem> items) {
    for (ItemBuffers& buffers : buffers_) {
      std::fill(buffers.output.begin(), buffers.output.end(), NAN);
      std::fill(buffers.lse.begin(), buffers.lse.end(), NAN);
    }
    return EmulateHostBatch({.geometry = geometry_,
                             .causal = causal_,
                             .output_type = ElementType::kFp32,
                             .items = items},
                            grid);
  }

  void ExpectRight() {
    for (std::size_t i = 0; i < items_.size(); ++i) ExpectItemRight(i);
  }

  // The bits of an item's results.
  std::vector<std::uint32_t> Bits(std::size_t item) const {
    std::vector<float> floats = buffers_[item].output;
    floats.insert(floats.end(), buffers_[item].lse.begin(), buffers_[item].lse.end());
    std::vector<std::uint32_t> bits(floats.size());
    std::memcpy(bits.data(), floats.data(), floats.size() * sizeof(float));
    return bits;
  }

  // Sets every element of an item's queries.
  void SetQuery(std::size_t item, float value) {
    std::vector<std::byte>& query = buffers_[item].query;
    const std::size_t bytes = kernels::ElementBytes(geometry_.type);
    for (std::size_t i = 0; i < query.size(); i += bytes) {
      StoreElement(geometry_.type, value, query.data() + i);
    }
  }

  std::vector<HostItem>& items() { return items_; }
  RandomLane& lane(std::size_t item) { return lanes_[item]; }
  std::mt19937_64& random() { return random_; }

 private:
  // Weights are rounded to the element type before the product with V, which accumulates in fp32.
  double WeightError() const {
    if (geometry_.type == ElementType::kBf16) return 0x1p-8;
    return geometry_.type == ElementType::kFp16 ? 0x1p-11 : 0x1p-20;
  }

  void ExpectItemRight(std::size_t i) {
    const HostItem& item = items_[i];
    const std::uint32_t group = geometry_.group();
    for (std::uint32_t column = 0; column < item.queries * group; ++column) {
      const std::uint32_t query = column / group;
      const std::uint32_t head = item.kv_head * group + column % group;
      const std::uint64_t row = std::uint64_t{query} * geometry_.query_heads + head;
      const kernels::DenseTile tile = {.head_dim = geometry_.head_dim, .type = geometry_.type};
      std::vector<double> expected(geometry_.head_dim);
      const kernels::OracleAnswer answer =
          kernels::AttendByDefinition({.geometry = &geometry_,
                                       .lane = item.lane,
                                       .row = buffers_[i].query.data() + row * tile.row_bytes(),
                                       .query_head = head,
                                       .position = item.first_query_position + query,
                                       .causal = causal_},
                                      expected.data());
      const double logit_error = answer.logit_mass * (geometry_.head_dim + 8) * 0x1p-24;
      const double bound = answer.value_peak * (WeightError() + 4 * logit_error) + 1e-30;
      for (std::uint32_t c = 0; c < geometry_.head_dim; ++c) {
        const float got = buffers_[i].output[row * geometry_.head_dim + c];
        ASSERT_LE(std::abs(got - expected[c]), bound)
            << "item " << i << " query " << query << " head " << head << " channel " << c
            << ": got " << got << ", expected " << expected[c];
      }
      const float lse = buffers_[i].lse[row];
      if (std::isinf(answer.lse)) {
        ASSERT_EQ(lse, -INFINITY);
      } else {
        ASSERT_LE(std::abs(lse - answer.lse),
                  2 * logit_error + 0x1p-19 * (1 + std::abs(answer.lse)))
            << "item " << i << " query " << query << " head " << head;
      }
    }
  }

  LayerGeometry geometry_;
  bool causal_;
  std::mt19937_64 random_;
  std::deque<RandomLane> lanes_;
  std::deque<ItemBuffers> buffers_;
  std::vector<HostItem> items_;
};

LayerGeometry Geometry(ElementType type, std::uint32_t head_dim, std::uint32_t kv_heads,
                       std::uint32_t group) {
  return {.query_heads = kv_heads * group,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .type = type,
          .scale = 1 / std::sqrt(static_cast<float>(head_dim))};
}

struct Variant {
  ElementType type;
  std::uint32_t head_dim;
};

class EveryVariant : public ::testing::TestWithParam<Variant> {};

TEST_P(EveryVariant, AgreesWithTheDefinition) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  Problem problem(Geometry(GetParam().type, GetParam().head_dim, 2, 4), true, seed);
  problem.Add({.segments = {700, 33}, .tail = 45, .ring_tiles = 4}, 1, 0);
  problem.Add({.segments = {}, .tail = 1, .ring_tiles = 2}, 1, 1);
  problem.Add({.segments = {31}, .tail = 0, .ring_tiles = 2}, 2, 1);
  problem.Add({.segments = {}, .tail = 0, .ring_tiles = 0}, 1, 0);
  ASSERT_EQ(problem.Run({.seed = seed}), kNoFault);
  problem.ExpectRight();
}

TEST_P(EveryVariant, AgreesWithEveryRuleOfALayer) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  const std::vector<float> sinks = {0.5f, -INFINITY, 200.0f, 0.0f, -200.0f};
  LayerGeometry geometry = Geometry(GetParam().type, GetParam().head_dim, 1, 5);
  geometry.sliding_window = 100;
  geometry.logit_softcap = 3;
  geometry.sinks = sinks.data();
  for (const bool causal : {true, false}) {
    Problem problem(geometry, causal, seed);
    problem.Add({.segments = {600}, .tail = 40, .ring_tiles = 3}, 7, 0);
    problem.Add({.segments = {10, 20}, .tail = 64, .ring_tiles = 3}, 3, 0);
    problem.Add({}, 1, 0);  // only the sinks
    ASSERT_EQ(problem.Run({.seed = seed}), kNoFault);
    problem.ExpectRight();
  }
}

std::string VariantName(const ::testing::TestParamInfo<Variant>& info) {
  return std::string(kernels::ElementName(info.param.type)) + "_" +
         std::to_string(info.param.head_dim);
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, EveryVariant,
    ::testing::Values(Variant{ElementType::kBf16, 64}, Variant{ElementType::kBf16, 128},
                      Variant{ElementType::kBf16, 256}, Variant{ElementType::kFp16, 64},
                      Variant{ElementType::kFp16, 128}, Variant{ElementType::kFp16, 256},
                      Variant{ElementType::kFp32, 64}, Variant{ElementType::kFp32, 128},
                      Variant{ElementType::kFp32, 256}),
    VariantName);

TEST(Attend, AgreesWithTheDefinitionOnRandomShapes) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto pick = [&random](std::uint32_t low, std::uint32_t high) {
    return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
  };
  for (int round = 0; round < 12; ++round) {
    SCOPED_TRACE(round);
    const auto type = static_cast<ElementType>(pick(1, 3));
    LayerGeometry geometry = Geometry(type, 64u << pick(0, 1), pick(1, 2), pick(1, 9));
    geometry.sliding_window = pick(0, 2) == 0 ? pick(1, 300) : 0;
    geometry.logit_softcap = pick(0, 2) == 0 ? 5.0f : 0.0f;
    Problem problem(geometry, pick(0, 3) != 0, random());
    for (std::uint32_t items = pick(1, 3); items > 0; --items) {
      LaneShape shape;
      for (std::uint32_t s = pick(0, 3); s > 0; --s) shape.segments.push_back(pick(1, 600));
      shape.ring_tiles = pick(1, 5);
      shape.tail = pick(0, shape.ring_tiles * 32 - 31);
      problem.Add(shape, pick(1, 4), pick(0, geometry.kv_heads - 1));
    }
    ASSERT_EQ(problem.Run({.blocks_x = pick(1, 9), .seed = random()}), kNoFault);
    problem.ExpectRight();
  }
}

class EveryType : public ::testing::TestWithParam<ElementType> {};

TEST_P(EveryType, BitsDependOnTheLaneAlone) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  Problem problem(Geometry(GetParam(), 64, 2, 3), true, seed);
  problem.Add({.segments = {1100, 40}, .tail = 70, .ring_tiles = 4}, 4, 0);
  problem.Add({.segments = {64}, .tail = 5, .ring_tiles = 2}, 1, 1);
  problem.Add({.segments = {520}, .tail = 33, .ring_tiles = 2}, 2, 0);
  ASSERT_EQ(problem.Run({.blocks_x = 1, .column_tiles = 1, .seed = seed}), kNoFault);
  const std::vector<std::uint32_t> bits = problem.Bits(0);
  // Another grid, another order, another width of column blocks.
  problem.Run({.blocks_x = 7, .column_tiles = 2, .seed = seed + 1});
  EXPECT_EQ(problem.Bits(0), bits);
  // Another place in another batch.
  const std::vector<HostItem> turned = {problem.items()[2], problem.items()[0]};
  problem.Run({.blocks_x = 3, .seed = seed + 2}, turned);
  EXPECT_EQ(problem.Bits(0), bits);
  problem.Run({.blocks_x = 3, .seed = seed + 3}, std::span(problem.items()).first(1));
  EXPECT_EQ(problem.Bits(0), bits);
}

// A query's result depends on the entries that it sees, not on the other queries of the call.
TEST_P(EveryType, BitsOfAQueryDoNotDependOnTheOtherQueries) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  LayerGeometry geometry = Geometry(GetParam(), 64, 1, 2);
  geometry.sliding_window = 90;
  Problem problem(geometry, true, seed);
  problem.Add({.segments = {300}, .tail = 40, .ring_tiles = 3}, 5, 0);
  problem.Run({.seed = seed});
  const std::vector<std::uint32_t> together = problem.Bits(0);
  HostItem& item = problem.items()[0];
  const HostItem all = item;
  for (std::uint32_t q = 0; q < 5; ++q) {
    item = all;
    item.queries = 1;
    item.first_query_position += q;
    item.query =
        static_cast<const std::byte*>(all.query) + q * 2 * 64 * kernels::ElementBytes(GetParam());
    problem.Run({.seed = seed + q});
    const std::vector<std::uint32_t> alone = problem.Bits(0);
    EXPECT_TRUE(std::equal(alone.begin(), alone.begin() + 2 * 64, together.begin() + q * 2 * 64))
        << "query " << q;
  }
}

TEST_P(EveryType, BadTilesAreReportedAndNotFollowed) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const std::uint64_t bad[] = {~std::uint64_t{0}, std::uint64_t{1} << 40, 8, ~std::uint64_t{63}};
  for (std::uint64_t offset : bad) {
    Problem problem(Geometry(GetParam(), 64, 2, 2), true, random());
    problem.Add({.segments = {100}, .tail = 5, .ring_tiles = 2}, 1, 0);
    problem.Add({.segments = {50, 600}, .tail = 5, .ring_tiles = 2}, 1, 1);
    problem.lane(1).table(1)[random() % 19] = offset;
    const std::uint64_t fault = problem.Run({.seed = random()});
    ASSERT_NE(fault, kNoFault);
    EXPECT_EQ(FaultWord::Kind(fault), FaultKind::kBadTile);
    EXPECT_EQ(FaultWord::Lane(fault), 3u);  // sequence 1, kv head 1
    problem.items().pop_back();
    problem.ExpectRight();  // the neighbour's result is complete
  }
}

TEST_P(EveryType, ATailLongerThanItsRingIsReported) {
  Problem problem(Geometry(GetParam(), 64, 1, 1), true, 1);
  problem.Add({.segments = {100}, .tail = 40, .ring_tiles = 2}, 1, 0);
  problem.lane(0).mutable_view().tail.end = problem.lane(0).view().tail.begin + 65;
  const std::uint64_t fault = problem.Run({});
  ASSERT_NE(fault, kNoFault);
  EXPECT_EQ(FaultWord::Kind(fault), FaultKind::kBadTail);
}

TEST_P(EveryType, NanInASeenRowReachesTheResult) {
  Problem problem(Geometry(GetParam(), 64, 1, 1), true, 1);
  problem.Add({.segments = {100}, .tail = 4, .ring_tiles = 2}, 1, 0);
  problem.lane(0).segment(0).entries = 101;  // row 100 % 32 = 4 of the last tile is dead: NaN
  problem.Run({});
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(problem.Bits(0)[0])));
}

std::string TypeName(const ::testing::TestParamInfo<ElementType>& info) {
  return kernels::ElementName(info.param);
}

TEST_P(EveryType, AQueryBeyondItsWindowSeesNothingOfTheParts) {
  LayerGeometry geometry = Geometry(GetParam(), 64, 1, 2);
  geometry.sliding_window = 100;
  Problem problem(geometry, true, 1);
  problem.Add({.segments = {600}, .tail = 3, .ring_tiles = 2}, 1, 0);
  problem.items()[0].first_query_position = 5000;
  ASSERT_EQ(problem.Run({}), kNoFault);
  problem.ExpectRight();  // zeros, and an lse of -infinity
}

// The first entry outweighs each of 512 others by 2^26, more than fp16 can resolve next to 1.
// Together the others are 8e-6 of the total, and all of the output. One warp sees the first entry
// and a quarter of the others.
TEST_P(EveryType, ManySmallWeightsAddUp) {
  LayerGeometry geometry = Geometry(GetParam(), 64, 1, 1);
  geometry.scale = 18.0f / 64;
  Problem problem(geometry, true, 1);
  problem.Add({.segments = {513}}, 1, 0);
  const kernels::DenseTile tile = {.head_dim = 64, .type = GetParam()};
  problem.lane(0).SetEveryElement(tile, 0, 1);
  problem.lane(0).SetFirstElement(tile, 1, 0);
  problem.SetQuery(0, 1);
  ASSERT_EQ(problem.Run({}), kNoFault);
  const double small = 512 * std::exp(-18.0);
  const float got = std::bit_cast<float>(problem.Bits(0)[5]);
  EXPECT_NEAR(got, small / (1 + small), small / 200);
}

INSTANTIATE_TEST_SUITE_P(Cuda, EveryType,
                         ::testing::Values(ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kFp32),
                         TypeName);

}  // namespace
}  // namespace tessera::tests
