// How much of rows is lost when only some of their rotated channels are kept.
#pragma once

#include <cstddef>

#include "kernels/format/operations.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/moments.h"

namespace tessera::kernels {

// Loss of a row x: 1 - |kept(R x)|^2 / |x|^2; 0 for a row of zeros. Of a lane: the mean over rows.
// Stored rotations are rounded and so not quite orthogonal: where nothing is dropped a loss is not
// exactly 0, and may be below it.
struct Loss {
  double key = 0;
  double value = 0;
};

// Both have equally many rows. Rows are finite.
struct LaneRows {
  RowSpan keys;
  RowSpan values;
};

// The mean loss of rows under a strategy that was made from others.
Loss LossUnder(const LaneRows& rows, const TileShape& shape, const RotationView& rotation,
               const Operations& operations);

// The same of rows that are packed already: each row's stored energy against the raw one's. At most
// 32 rows.
Loss LossOfTile(const LaneRows& raw, const TileShape& shape, const std::byte* tile,
                const Operations& operations);

}  // namespace tessera::kernels
