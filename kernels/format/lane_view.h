// What an attention kernel reads: one lane, as plain pointers into mappings that stay valid for
// the call. Built by proto/shm (from mapped snapshots) or by tests; kernels never build one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// A run of entries that share one strategy. Entry e lives in tile e / 32, row e % 32. Its position
// is first_position + e, or, where the shape has positions, first_position + the tile's word; those
// words rise with e.
//
// The offsets are memory the daemon owns and may reuse once a revoked reader's pin is gone, so a
// kernel checks every one against `arena_bytes` when it reads it, and reads it once. An offset that
// does not fit is reported as kBadTile; it never becomes a wild pointer.
struct SegmentView {
  const std::byte* arena = nullptr;             // base of the mapping the offsets count from
  std::uint64_t arena_bytes = 0;                // readable bytes from `arena`
  const std::uint64_t* tile_offsets = nullptr;  // ceil(entries / 32) byte offsets
  // As many, of the summaries of each tile's blocks; null: they stand right behind their tile.
  const std::uint64_t* summary_offsets = nullptr;
  std::uint64_t first_position = 0;
  std::uint64_t position_span = 0;  // positions end before first_position + it; 0: `entries`
  std::uint32_t entries = 0;
  TileShape shape;
  RotationView rotation;  // of packed tiles

  constexpr std::uint64_t positions() const { return position_span != 0 ? position_span : entries; }
};

// The newest tokens, in a ring of dense tiles. Token t (an ordinal of the sequence, which is also
// its position) lives in ring tile (t / 32) % ring_tiles, row t % 32. Live tokens: [begin, end).
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
