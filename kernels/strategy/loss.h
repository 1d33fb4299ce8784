// The energy lost when only some of a row's rotated channels are kept.
#pragma once

#include <cstddef>

#include "kernels/format/operations.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/moments.h"

namespace tessera::kernels {

// The loss of a row x is 1 - |kept(R x)|^2 / |x|^2, or 0 for a row of zeros; a lane's loss is the
// mean over rows. Stored rotations are rounded and so not exactly orthogonal: if nothing is
// dropped, the loss is close to 0 but may be negative.
struct Loss {
  double key = 0;
  double value = 0;
};

// Both sides have the same number of rows. Rows are finite.
struct LaneRows {
  RowSpan keys;
  RowSpan values;
};

// The mean loss of rows under a strategy that was made from other rows.
Loss LossUnder(const LaneRows& rows, const TileShape& shape, const RotationView& rotation,
               const Operations& operations);

// The mean loss of rows that are already packed: each row's stored energy against its raw energy.
// At most 32 rows.
Loss LossOfTile(const LaneRows& raw, const TileShape& shape, const std::byte* tile,
                const Operations& operations);

}  // namespace tessera::kernels
