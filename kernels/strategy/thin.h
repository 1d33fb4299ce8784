// Packed rows that keep fewer of the channels they have: the strongest of these, as they are
// stored. Nothing is rotated, and no value rounded again: a row comes out as if it had been packed
// like this at first, but for channels whose stored values are equally large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// The shape whose rows keep at most `share` of head_dim, in whole groups. Nothing: tiles of this
// shape would not become smaller.
std::optional<TileShape> ThinnerShape(const TileShape& shape, double share);

struct ThinJob {
  TileShape from;
  const std::byte* tile;
  const std::byte* summaries;
  std::uint32_t rows;  // of the tile that hold something, at most 32
  TileShape to;        // ThinnerShape(from, a share)
  std::byte* thinned;  // LayoutOf(to).bytes
  std::byte* thinned_summaries;
};

// The share of the squared length of stored rows that stays; the mean over rows, 1 of rows of
// zeros.
struct Stays {
  double key = 1;
  double value = 1;
};

// Mean keys keep the strongest of theirs. Bounds are widened to 0 in channels that a key lost: they
// still bound what is left.
Stays ThinTile(const ThinJob& job);

}  // namespace tessera::kernels
