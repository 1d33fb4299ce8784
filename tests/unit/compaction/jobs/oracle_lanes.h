// The entries that the oracle of tokens_property_test expects of lanes, compared with what lanes
// hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {

struct OracleEntry {
  std::uint64_t position = 0;
  float weight = 1;
  std::vector<std::byte> key;
  std::vector<std::byte> value;
};
struct OracleLane {
  std::vector<OracleEntry> entries;
  std::uint64_t tail_start = 0;
};
using OracleLayer = std::vector<OracleLane>;  // by kv head

// Whether a description reports these entries.
inline bool Matches(const cache::Sequence::Description& shown, std::uint32_t layer,
                    const OracleLayer& expected) {
  return std::ranges::all_of(shown.lanes, [&](const auto& lane) {
    if (lane.layer != layer) return true;
    const std::vector<OracleEntry>& entries = expected[lane.kv_head].entries;
    if (lane.positions.size() != entries.size() || lane.entries != entries.size()) return false;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (lane.positions[i] != entries[i].position) return false;
      if (lane.weights[i] != entries[i].weight) return false;
    }
    return true;
  });
}
inline bool HasPacked(const cache::Sequence::Description& shown, std::uint32_t layer) {
  return std::ranges::any_of(shown.lanes, [&](const auto& lane) {
    return lane.layer == layer &&
           std::ranges::any_of(lane.runs, [](const auto& run) { return run.shape.packed(); });
  });
}

// Returns an empty string if the lane's segments show these entries. `turned`: keys differ from the
// appended ones.
inline std::string LaneShows(const cache::SequenceView& view,
                             const cache::SequenceView::LaneOf& lane, const OracleLane& expected,
                             bool turned, std::size_t row_bytes) {
  std::size_t next = 0;
  for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
    const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
    const kernels::TileLayout at = kernels::LayoutOf(segment.shape);
    if (segment.entries == 0) return "an empty segment";
    for (std::uint32_t e = 0; e < segment.entries; ++e, ++next) {
      if (next == expected.entries.size()) return "more entries than there should be";
      const OracleEntry& entry = expected.entries[next];
      const std::uint32_t row = e % kernels::kTileEntries;
      const std::byte* const tile = segment.arena + segment.tile_offsets[e / kernels::kTileEntries];
      std::uint32_t offset = e;
      if (segment.shape.positions) std::memcpy(&offset, tile + at.positions + 4 * row, 4);
      float weight = 1;
      if (segment.shape.weights) std::memcpy(&weight, tile + at.weights + 4 * row, 4);
      const std::string name = "entry " + std::to_string(next) + " of segment " +
                               std::to_string(s) + " (" + std::to_string(entry.position) + ") ";
      if (segment.first_position + offset != entry.position) {
        return name + "is at " + std::to_string(segment.first_position + offset);
      }
      if (weight != entry.weight) return name + "weighs " + std::to_string(weight);
      if (e + 1 == segment.entries && segment.position_span != offset + 1) {
        return name + "is not what the segment ends with";
      }
      if (segment.shape.packed()) continue;
      const auto same = [&](std::uint32_t array, const std::vector<std::byte>& bytes) {
        return std::memcmp(tile + array + row * row_bytes, bytes.data(), row_bytes) == 0;
      };
      if (!turned && !same(at.key_data, entry.key)) return name + "has another's key";
      if (!same(at.value_data, entry.value)) return name + "has another's value";
    }
  }
  if (next != expected.entries.size()) return "has " + std::to_string(next) + " entries";
  if (lane.resolved.entries != next) return "counts other entries";
  if (lane.resolved.segments > 0 && lane.resolved.tail_start != expected.tail_start) {
    return "the tail starts elsewhere";
  }
  return "";
}

}  // namespace tessera::compaction
