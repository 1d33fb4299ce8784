// Converts between the tile shape of a segment and its SegmentRef in a snapshot.
#pragma once

#include "kernels/format/tile_shape.h"
#include "proto/shm/layout.h"

namespace tessera::shm {

inline void SetShape(const kernels::TileShape& shape, SegmentRef& ref) {
  ref.head_dim = shape.head_dim;
  ref.key_channels = shape.key.channels;
  ref.key_kept = shape.key.kept;
  ref.value_channels = shape.value.channels;
  ref.value_kept = shape.value.kept;
  ref.format = static_cast<std::uint8_t>(shape.format);
  ref.group = shape.group;
  ref.summary = static_cast<std::uint8_t>(shape.summary);
  ref.block = shape.block;
  ref.key_planes[0] = shape.key_planes.first;
  ref.key_planes[1] = shape.key_planes.second;
  ref.value_planes[0] = shape.value_planes.first;
  ref.value_planes[1] = shape.value_planes.second;
  ref.flags = static_cast<std::uint8_t>((shape.weights ? kSegmentHasWeights : 0) |
                                        (shape.positions ? kSegmentHasPositions : 0));
}

// The result is unchecked: check it with kernels::UnsupportedReason.
inline kernels::TileShape ShapeOf(const SegmentRef& ref) {
  return {.format = static_cast<kernels::TileFormat>(ref.format),
          .head_dim = ref.head_dim,
          .key = {.channels = ref.key_channels, .kept = ref.key_kept},
          .value = {.channels = ref.value_channels, .kept = ref.value_kept},
          .group = ref.group,
          .summary = static_cast<kernels::Summary>(ref.summary),
          .block = ref.block,
          .weights = (ref.flags & kSegmentHasWeights) != 0,
          .positions = (ref.flags & kSegmentHasPositions) != 0,
          .key_planes = {ref.key_planes[0], ref.key_planes[1]},
          .value_planes = {ref.value_planes[0], ref.value_planes[1]}};
}

}  // namespace tessera::shm
