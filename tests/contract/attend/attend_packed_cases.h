// Shared helpers of the tests of attention over packed lanes.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tests/contract/attend/attend_batch.h"
#include "tests/contract/attend/attend_packed_lanes.h"

namespace tessera::kernels {

// A batch of one kv head with random options.
BatchShape AnyBatch(std::uint32_t head_dim, ElementType type, std::uint32_t group,
                    TestRandom& random);
BatchShape AnyBatch(TestRandom& random);
std::string Describe(const BatchShape& shape);

ElementType AnyElementType(TestRandom& random);
ElementType AnyRotationType(TestRandom& random);  // bf16 or fp32

// A shape with the batch's head_dim, and with its type if dense.
TileShape AnySegmentShape(const BatchShape& batch, const ShapeWish& wish, TestRandom& random);
// Rotated; sometimes unrotated if the shape allows it.
Strategy AnyStrategy(const TileShape& shape, TestRandom& random);

// A lane with segments of several strategies, and the rows and strategies it is made of.
struct Mixture {
  Mixture(const BatchShape& batch, const ShapeWish& wish, const std::vector<std::uint32_t>& entries,
          std::uint32_t tail, TestRandom& random);
  std::string Describe() const;

  SourceRows rows;
  std::deque<Strategy> strategies;
  std::unique_ptr<PackedLane> lane;
};

// Adds `queries`, the last one at the lane's newest position.
void AddNewest(TestBatch& batch, const PackedLane& lane, std::uint32_t queries);

// The distance between two encodings of the same entries.
struct LaneDistance {
  double key = 0;         // max |k - k'|
  double value = 0;       // max |v - v'|
  double relative = 0;    // the larger of both, relative to |k| or |v|
  double value_peak = 0;  // max |v_c|
};
LaneDistance DistanceOf(const ExactLane& a, const ExactLane& b, std::uint32_t head_dim);

}  // namespace tessera::kernels
