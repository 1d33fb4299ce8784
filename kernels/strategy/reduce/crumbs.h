// Shortens 6-bit codes of planes to 4 bits, by dropping the lower two bits of each ("crumbs"). The
// upper four bits stay as they are and the row's scale is four times larger: nothing is rotated or
// coded again.
#pragma once

#include <optional>

#include "kernels/format/operations.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/reduce/channels.h"

namespace tessera::kernels {

// The shape of the tiles without crumbs of keys. Nullopt: they have none, or would not become
// smaller.
std::optional<TileShape> ShapeWithoutCrumbs(const TileShape& shape);

// `job.to` must be ShapeWithoutCrumbs(job.from). An index of signs stays as it is. Returns
// 1 - |change|^2 / |z|^2, summed over the tile's rotated, centred keys z.
Stays DropCrumbs(const ReduceJob& job, const Operations& operations);

}  // namespace tessera::kernels
