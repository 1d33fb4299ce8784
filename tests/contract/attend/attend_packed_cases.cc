#include "tests/contract/attend/attend_packed_cases.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gtest/gtest.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

double Distance(const double* a, const double* b, std::uint32_t count) {
  double squares = 0;
  for (std::uint32_t i = 0; i < count; ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

}  // namespace

ElementType AnyElementType(TestRandom& random) { return random.Pick(kTypes); }

ElementType AnyRotationType(TestRandom& random) {
  return random.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
}

BatchShape AnyBatch(std::uint32_t head_dim, ElementType type, std::uint32_t group,
                    TestRandom& random) {
  constexpr std::uint32_t kWindows[] = {0, 0, 1, 17, 64, 1000};
  BatchShape shape = {.geometry = {.query_heads = group,
                                   .kv_heads = 1,
                                   .head_dim = head_dim,
                                   .type = type,
                                   .scale = 1 / std::sqrt(static_cast<float>(head_dim))}};
  shape.causal = !random.OneIn(3);
  shape.geometry.sliding_window = random.Pick(kWindows);
  shape.geometry.logit_softcap = random.OneIn(3) ? 1.5f : 0;
  shape.sinks = random.OneIn(2);
  shape.output_type = random.OneIn(2) ? ElementType::kFp32 : type;
  return shape;
}

BatchShape AnyBatch(TestRandom& random) {
  constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 8};
  return AnyBatch(static_cast<std::uint32_t>(random.Pick(kHeadDims)), AnyElementType(random),
                  random.Pick(kGroups), random);
}

TileShape AnySegmentShape(const BatchShape& batch, const ShapeWish& wish, TestRandom& random) {
  TileShape shape = RandomShape(random, wish);
  while (shape.head_dim != batch.geometry.head_dim) shape = RandomShape(random, wish);
  if (!shape.packed()) shape.format = DenseFormat(batch.geometry.type);
  return shape;
}

Strategy AnyStrategy(const TileShape& shape, TestRandom& random) {
  const bool may_be_identity =
      shape.key.channels == shape.head_dim && shape.value.channels == shape.head_dim;
  const bool rotated = shape.packed() && !(may_be_identity && random.OneIn(4));
  return {shape, rotated, AnyRotationType(random), random};
}

std::string Describe(const BatchShape& shape) {
  return (testing::Message() << ElementName(shape.geometry.type) << " D " << shape.geometry.head_dim
                             << " G " << shape.geometry.group() << " causal " << shape.causal
                             << " window " << shape.geometry.sliding_window << " cap "
                             << shape.geometry.logit_softcap << " sinks " << shape.sinks << " to "
                             << ElementName(shape.output_type))
      .GetString();
}

Mixture::Mixture(const BatchShape& batch, const ShapeWish& wish,
                 const std::vector<std::uint32_t>& entries, std::uint32_t tail, TestRandom& random)
    : rows(batch.geometry.head_dim, batch.geometry.type,
           std::accumulate(entries.begin(), entries.end(), tail), Values::kNormal, random) {
  std::vector<SegmentPlan> plan;
  for (std::uint32_t count : entries) {
    strategies.push_back(AnyStrategy(AnySegmentShape(batch, wish, random), random));
    plan.push_back({.strategy = &strategies.back(), .entries = count});
  }
  const std::uint64_t position = random.OneIn(2) ? 0 : random.Below(1u << 30);
  lane = std::make_unique<PackedLane>(rows, 0, plan, tail, position, random);
}

std::string Mixture::Describe() const {
  std::string text;
  for (const Strategy& strategy : strategies) {
    text += "\n  " + kernels::Describe(strategy.shape) +
            (strategy.view().key != nullptr ? " K rotated" : "") +
            (strategy.view().value != nullptr ? " V rotated" : "");
  }
  return text;
}

void AddNewest(TestBatch& batch, const PackedLane& lane, std::uint32_t queries) {
  const std::uint64_t end = lane.end_position();
  batch.AddViews({&lane.view()}, queries, end < queries ? 0 : end - queries);
}

LaneDistance DistanceOf(const ExactLane& a, const ExactLane& b, std::uint32_t head_dim) {
  const std::vector<double> zero(head_dim, 0.0);
  LaneDistance distance;
  for (std::size_t e = 0; e < a.entries().size(); ++e) {
    const ExactLane::Entry& x = a.entries()[e];
    const ExactLane::Entry& y = b.entries()[e];
    const double key = Distance(x.key, y.key, head_dim);
    const double value = Distance(x.value, y.value, head_dim);
    distance.key = std::max(distance.key, key);
    distance.value = std::max(distance.value, value);
    distance.relative = std::max({distance.relative, key / Distance(x.key, zero.data(), head_dim),
                                  value / Distance(x.value, zero.data(), head_dim)});
    distance.value_peak = std::max({distance.value_peak, x.value_peak, y.value_peak});
  }
  return distance;
}

}  // namespace tessera::kernels
