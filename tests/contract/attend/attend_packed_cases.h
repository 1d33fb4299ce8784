// What the tests of attention over packed lanes have in common.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tests/contract/attend/attend_batch.h"
#include "tests/contract/attend/attend_packed_lanes.h"

namespace tessera::kernels {

// Options that every shape should meet in some combination; one kv head.
BatchShape AnyBatch(std::uint32_t head_dim, ElementType type, std::uint32_t group,
                    TestRandom& random);
BatchShape AnyBatch(TestRandom& random);
std::string Describe(const BatchShape& shape);

ElementType AnyElementType(TestRandom& random);
ElementType AnyRotationType(TestRandom& random);  // bf16 or fp32

// A shape of the batch's head_dim, and of its type where it is dense.
TileShape AnySegmentShape(const BatchShape& batch, const ShapeWish& wish, TestRandom& random);
// Rotated, or not where the shape allows it.
Strategy AnyStrategy(const TileShape& shape, TestRandom& random);

// A lane of segments of several strategies, with what it is made of.
struct Mixture {
  Mixture(const BatchShape& batch, const ShapeWish& wish, const std::vector<std::uint32_t>& entries,
          std::uint32_t tail, TestRandom& random);
  std::string Describe() const;

  SourceRows rows;
  std::deque<Strategy> strategies;
  std::unique_ptr<PackedLane> lane;
};

// `queries` of which the last stands at the lane's newest position.
void AddNewest(TestBatch& batch, const PackedLane& lane, std::uint32_t queries);

// How far apart two readings of the same entries are.
struct LaneDistance {
  double key = 0;         // |k - k'|, the largest
  double value = 0;       // |v - v'|, likewise
  double relative = 0;    // the larger of both over |k| or |v|
  double value_peak = 0;  // max |v_c|
};
LaneDistance DistanceOf(const ExactLane& a, const ExactLane& b, std::uint32_t head_dim);

}  // namespace tessera::kernels
