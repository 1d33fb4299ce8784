// The bytes of a sequence as readers see them, independent of their addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/unit/cache/world.h"

namespace tessera::cache {

// Everything that readers see of a sequence, except addresses.
inline std::vector<std::byte> Image(const SequenceView& view) {
  std::vector<std::byte> image;
  const auto add = [&](const void* from, std::uint64_t bytes) {
    const auto* at = static_cast<const std::byte*>(from);
    image.insert(image.end(), at, at + bytes);
  };
  for (const SequenceView::LaneOf& lane : view.lanes) {
    add(&lane.resolved.entries, sizeof lane.resolved.entries);
    add(&lane.resolved.tail_start, sizeof lane.resolved.tail_start);
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      add(&segment.first_position, sizeof segment.first_position);
      add(&segment.position_span, sizeof segment.position_span);
      add(&segment.entries, sizeof segment.entries);
      const kernels::TileShape& shape = segment.shape;
      const std::uint32_t words[] = {static_cast<std::uint32_t>(shape.format),
                                     shape.key.channels,
                                     shape.key.kept,
                                     shape.value.kept,
                                     shape.group,
                                     static_cast<std::uint32_t>(shape.summary),
                                     shape.block};
      add(words, sizeof words);
      const kernels::TileLayout layout = kernels::LayoutOf(shape);
      for (std::uint32_t e = 0; e < segment.entries; e += kernels::kTileEntries) {
        const std::uint32_t tile = e / kernels::kTileEntries;
        add(segment.arena + segment.tile_offsets[tile], layout.bytes);
        if (layout.summary_bytes == 0) continue;
        add(segment.arena + segment.summary_offsets[tile], layout.summary_bytes);
      }
      if (segment.rotation.key != nullptr) {
        add(segment.rotation.key, kernels::RotationBytes(shape, shape.key, segment.rotation.type));
      }
      if (segment.rotation.value != nullptr) {
        add(segment.rotation.value,
            kernels::RotationBytes(shape, shape.value, segment.rotation.type));
      }
    }
  }
  return image;
}

}  // namespace tessera::cache
