// Attention over packed segments, and dense ones with summaries, weights and positions, against its
// definition.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/contract/attend/attend_conformance.h"
#include "tests/contract/attend/attend_packed_cases.h"

namespace tessera::kernels {
namespace {

constexpr ValueType kValueTypes[] = {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8,
                                     ValueType::kFp8};

TEST_P(AttendPackedConformance, EveryShape) {
  for (std::uint32_t head_dim : kHeadDims) {
    for (ValueType values : kValueTypes) {
      for (std::uint8_t group : {1, 2, 4}) {
        for (std::uint32_t queries : {1u, 3u, 40u}) {
          constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 8};
          const BatchShape shape =
              AnyBatch(head_dim, AnyElementType(random_), random_.Pick(kGroups), random_);
          const RowShape quarter = {static_cast<std::uint16_t>(head_dim),
                                    static_cast<std::uint16_t>(head_dim / 4)};
          const TileShape tile = {.format = PackedFormat(values),
                                  .head_dim = static_cast<std::uint16_t>(head_dim),
                                  .key = quarter,
                                  .value = quarter,
                                  .group = group};
          const Strategy strategy(tile, true, AnyRotationType(random_), random_);
          const SourceRows rows(head_dim, shape.geometry.type, 33 + 41 + 20, Values::kNormal,
                                random_);
          const PackedLane lane(rows, 0, {{&strategy, 33}, {&strategy, 0}, {&strategy, 41}}, 20,
                                random_.Below(1000), random_);
          SCOPED_TRACE(Describe(shape) + " n_q " + std::to_string(queries) + " over " +
                       Describe(tile));
          TestBatch batch(shape, random_);
          AddNewest(batch, lane, queries);
          RunAndJudge(batch);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Segments of any shape, including dense ones with summaries, weights and positions.
TEST_P(AttendPackedConformance, Mixtures) {
  for (int round = 0; round < subject().rounds(60); ++round) {
    const BatchShape shape = AnyBatch(random_);
    std::vector<std::uint32_t> entries(random_.Below(5));
    for (std::uint32_t& count : entries) {
      count = static_cast<std::uint32_t>(random_.Below(random_.OneIn(3) ? 200 : 40));
    }
    const Mixture mixture(shape, {.cut = true, .dense = true}, entries,
                          static_cast<std::uint32_t>(random_.Below(70)), random_);
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, static_cast<std::uint32_t>(random_.Between(1, 12)));
    const std::uint64_t anywhere = mixture.lane->end_position();  // before or among the entries
    batch.AddViews({&mixture.lane->view()}, 3,
                   anywhere - random_.Below(std::min<std::uint64_t>(anywhere, 300) + 1));
    RunAndJudge(batch);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendPackedConformance, SeveralParts) {
  for (std::uint32_t entries : {2047u, 2049u, 4100u}) {
    BatchShape shape = AnyBatch(64, AnyElementType(random_), 2, random_);
    const Mixture mixture(shape, {.cut = true}, {entries, 40}, 1, random_);
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 2);
    RunAndJudge(batch);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendPackedConformance, ExtremeKeys) {
  for (Values values : {Values::kLarge, Values::kHuge, Values::kEqual, Values::kZeros}) {
    for (ValueType stored : kValueTypes) {
      const ElementType type = AnyElementType(random_);
      const bool large = values == Values::kLarge || values == Values::kHuge;
      if (large && stored == ValueType::kFp16) continue;  // exceeds fp16
      BatchShape shape = AnyBatch(128, type, 2, random_);
      const TileShape tile = {
          .format = PackedFormat(stored), .key = {128, 32}, .value = {128, 32}, .group = 2};
      const Strategy strategy = AnyStrategy(tile, random_);
      const SourceRows rows(128, type, 90, values, random_);
      const PackedLane lane(rows, 0, {{&strategy, 70}}, 20, 0, random_);
      SCOPED_TRACE(Describe(shape) + " over " + Describe(tile) + " values " +
                   std::to_string(static_cast<int>(values)));
      TestBatch batch(shape, random_);
      AddNewest(batch, lane, 2);
      RunAndJudge(batch);
      if (HasFatalFailure()) return;
    }
  }
}

// A packed lane that keeps every channel equals the dense lane up to the rounding of its values.
TEST_P(AttendPackedConformance, KeepingEveryChannelIsDense) {
  // Per value type, relative to a row's length.
  constexpr double kRounding[] = {0x1p-8, 0x1p-11, 0x1p-5, 0x1p-4};
  for (ValueType values : kValueTypes) {
    for (std::uint32_t head_dim : kHeadDims) {
      BatchShape shape = AnyBatch(head_dim, ElementType::kFp32, 2, random_);
      shape.output_type = ElementType::kFp32;
      const auto dim = static_cast<std::uint16_t>(head_dim);
      const TileShape tile = {.format = PackedFormat(values),
                              .head_dim = dim,
                              .key = {dim, dim},
                              .value = {dim, dim},
                              .group = static_cast<std::uint8_t>(1u << random_.Below(3))};
      SCOPED_TRACE(Describe(shape) + " over " + Describe(tile));
      const Strategy packed(tile, true, ElementType::kFp32, random_);
      const Strategy dense(DenseShape(head_dim, ElementType::kFp32), false, ElementType::kFp32,
                           random_);
      const SourceRows rows(head_dim, ElementType::kFp32, 100, Values::kNormal, random_);
      const PackedLane packed_lane(rows, 0, {{&packed, 45}, {&packed, 40}}, 15, 7, random_);
      const PackedLane dense_lane(rows, 0, {{&dense, 85}}, 15, 7, random_);
      const ExactLane exact_lane(dense_lane.view(), shape.geometry);
      const LaneDistance distance =
          DistanceOf(exact_lane, ExactLane(packed_lane.view(), shape.geometry), head_dim);
      ASSERT_LE(distance.relative, kRounding[static_cast<std::size_t>(values) - 1]);

      TestBatch batch(shape, random_);
      AddNewest(batch, packed_lane, 4);
      RunAndJudge(batch);
      const AttendItem& item = batch.items()[0];
      for (std::uint32_t row = 0; row < 8; ++row) {
        std::vector<double> exact(head_dim);
        const auto* query = static_cast<const float*>(item.query) + std::size_t{row} * head_dim;
        const OracleAnswer answer =
            AttendByDefinition({.geometry = &batch.batch().geometry,
                                .lane = &dense_lane.view(),
                                .row = query,
                                .query_head = row % 2,
                                .position = item.first_query_position + row / 2,
                                .causal = shape.causal},
                               exact_lane, exact.data());
        const double length = std::sqrt(std::inner_product(query, query + head_dim, query, 0.0));
        const double slack = subject().bound_of(tile).At(2 * answer.logit_mass + 2);
        const double logit = shape.geometry.scale * length * distance.key + slack;
        const double allowed = std::expm1(2 * logit) * distance.value_peak + distance.value + slack;
        const auto* output = static_cast<const float*>(item.output) + std::size_t{row} * head_dim;
        for (std::uint32_t c = 0; c < head_dim; ++c) ASSERT_NEAR(output[c], exact[c], allowed);
        if (answer.visible != 0) {
          ASSERT_NEAR(item.lse[row], answer.lse, logit + 0x1p-18);
        }
      }
    }
  }
}

// If keys drop the same channels in every token, the result equals that of a dense lane with zeros
// in those channels.
TEST_P(AttendPackedConformance, KeysWithoutSomeChannelsAreDenseOnesWithZeros) {
  for (std::uint32_t head_dim : kHeadDims) {
    for (ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
      const BatchShape shape = AnyBatch(head_dim, type, random_.OneIn(2) ? 1 : 4, random_);
      std::vector<std::uint32_t> channels(head_dim);
      std::iota(channels.begin(), channels.end(), 0u);
      for (std::uint32_t i = head_dim; i > 1; --i) {
        std::swap(channels[i - 1], channels[random_.Below(i)]);
      }
      channels.resize(random_.OneIn(2) ? head_dim - head_dim * 2 / 5
                                       : random_.Between(1, head_dim - 1));
      std::sort(channels.begin(), channels.end());
      const auto dim = static_cast<std::uint16_t>(head_dim);
      const auto kept = static_cast<std::uint16_t>(channels.size());
      const TileShape tile = {.format = PackedFormat(static_cast<ValueType>(type)),
                              .head_dim = dim,
                              .key = {kept, kept},
                              .value = {dim, dim}};
      SCOPED_TRACE(Describe(shape) + " over " + Describe(tile));
      const Strategy cut(tile, AnyRotationType(random_), channels);
      const Strategy dense(DenseShape(head_dim, type), false, type, random_);
      const SourceRows rows(head_dim, type, 150, Values::kNormal, random_);
      // The newest 45 tokens keep all channels in both lanes.
      SourceRows zeroed(head_dim, type, 150, Values::kZeros, random_);
      std::memcpy(zeroed.values.data(), rows.values.data(), rows.values.size());
      for (std::uint32_t e = 0; e < 150; ++e) {
        for (std::uint32_t c = 0; c < head_dim; ++c) {
          const bool stays = e >= 105 || std::binary_search(channels.begin(), channels.end(), c);
          const std::size_t at = (std::size_t{e} * head_dim + c) * 2;
          if (stays) std::memcpy(zeroed.keys.data() + at, rows.keys.data() + at, 2);
        }
      }
      const PackedLane lane(rows, 0, {{&cut, 70}, {&cut, 35}, {&dense, 25}}, 20, 7, random_);
      const PackedLane other(zeroed, 0, {{&dense, 130}}, 20, 7, random_);
      const LaneDistance distance = DistanceOf(ExactLane(other.view(), shape.geometry),
                                               ExactLane(lane.view(), shape.geometry), head_dim);
      ASSERT_EQ(distance.key, 0);
      ASSERT_EQ(distance.value, 0);
      TestBatch batch(shape, random_);
      AddNewest(batch, lane, random_.OneIn(2) ? 1 : 5);
      RunAndJudge(batch);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttendPackedConformance, NanInAQueryGivesNan) {
  const BatchShape shape = AnyBatch(random_);
  Mixture mixture(shape, {.cut = true}, {70}, 3, random_);
  TestBatch batch(shape, random_);
  AddNewest(batch, *mixture.lane, 1);
  std::memset(batch.query(0), 0xff, 4);
  ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
  ASSERT_TRUE(std::isnan(*batch.items()[0].lse)) << Describe(shape) << mixture.Describe();
}

}  // namespace
}  // namespace tessera::kernels
