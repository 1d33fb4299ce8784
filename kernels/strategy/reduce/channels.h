// Re-encodes packed rows with fewer channels. Each row keeps the strongest of its stored channels,
// with their stored values unchanged: nothing is rotated or rounded again. The result is the same
// as packing with fewer channels from the start, except for ties between stored values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// The shape whose rows keep at most `share` of head_dim, in whole groups. Nullopt if that would not
// make tiles smaller.
std::optional<TileShape> ReducedShape(const TileShape& shape, double share);

struct ReduceJob {
  TileShape from;
  const std::byte* tile;
  const std::byte* summaries;
  std::uint32_t rows;  // rows of the tile that hold entries, at most 32
  TileShape to;        // ReducedShape(from, a share)
  std::byte* thinned;  // LayoutOf(to).bytes
  std::byte* thinned_summaries;
};

// The mean over rows of the share of a row's stored energy that is kept; 1 for rows of zeros.
struct Stays {
  double key = 1;
  double value = 1;
};

// Mean keys keep their strongest channels. Min/max bounds are widened to include 0 in channels that
// a key of the block lost, so they still bound the remaining values.
Stays ReduceTile(const ReduceJob& job);

}  // namespace tessera::kernels
