// Bytes per token as a daemon's pool counts them.
#pragma once

#include "absl/status/status.h"
#include "client/cli/bench/report.h"
#include "kernels/format/tile_shape.h"

namespace tessera::cli::bench {

// Starts a daemon, has a lane of one full segment compressed to this shape, and adds what the pool
// then holds for it: tiles and rotations.
absl::Status AddPoolGauge(const kernels::TileShape& tile, Report& report);

}  // namespace tessera::cli::bench
