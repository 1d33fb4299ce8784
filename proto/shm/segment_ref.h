// The shape of a segment's tiles, to and from its reference in a snapshot.
#pragma once

#include "kernels/format/tile_shape.h"
#include "proto/shm/layout.h"

namespace tessera::shm {

inline void SetShape(const kernels::TileShape& shape, SegmentRef& ref) {
  ref.head_dim = shape.head_dim;
  ref.channels = shape.channels;
  ref.kept = shape.kept;
  ref.format = static_cast<std::uint8_t>(shape.format);
  ref.group = shape.group;
  ref.summary = static_cast<std::uint8_t>(shape.summary);
  ref.block = shape.block;
  ref.flags = static_cast<std::uint8_t>((shape.weights ? kSegmentHasWeights : 0) |
                                        (shape.positions ? kSegmentHasPositions : 0));
}

// Not yet checked: see kernels::WhyNotServed.
inline kernels::TileShape ShapeOf(const SegmentRef& ref) {
  return {.format = static_cast<kernels::TileFormat>(ref.format),
          .head_dim = ref.head_dim,
          .channels = ref.channels,
          .kept = ref.kept,
          .group = ref.group,
          .summary = static_cast<kernels::Summary>(ref.summary),
          .block = ref.block,
          .weights = (ref.flags & kSegmentHasWeights) != 0,
          .positions = (ref.flags & kSegmentHasPositions) != 0};
}

}  // namespace tessera::shm
