// The input of an attention kernel: one lane as plain pointers into mappings that stay valid for
// the call. proto/shm builds it from mapped snapshots, tests build their own; kernels never do.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// One segment: entries that share a strategy. Entry e is row e % 32 of tile e / 32. Its position is
// first_position + e, or, if the shape has positions, first_position + the tile's position word.
// Position words rise with e.
//
// The daemon owns the offset tables and may reuse the memory once it has revoked the reader's pin.
// A kernel therefore reads each offset once and checks it against `arena_bytes`. An offset that
// does not fit gives kBadTile; it is never dereferenced.
struct SegmentView {
  const std::byte* arena = nullptr;             // base of the mapping; offsets are relative to it
  std::uint64_t arena_bytes = 0;                // readable bytes from `arena` on
  const std::uint64_t* tile_offsets = nullptr;  // ceil(entries / 32) byte offsets
  // ceil(entries / 32) offsets of the tiles' block summaries; null: each follows its tile directly.
  const std::uint64_t* summary_offsets = nullptr;
  std::uint64_t first_position = 0;
  std::uint64_t position_span = 0;  // positions are below first_position + span; 0: `entries`
  std::uint32_t entries = 0;
  TileShape shape;
  RotationView rotation;  // packed tiles only

  constexpr std::uint64_t positions() const { return position_span != 0 ? position_span : entries; }
};

// The newest tokens, in a ring of dense tiles. Token t is row t % 32 of ring tile (t / 32) %
// ring_tiles; t is an ordinal of the sequence and also its position. Live tokens are [begin, end).
struct TailView {
  const std::byte* ring = nullptr;
  std::uint32_t ring_tiles = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct LaneView {
  const SegmentView* segments = nullptr;
  std::uint32_t segment_count = 0;
  TailView tail;
};

}  // namespace tessera::kernels
