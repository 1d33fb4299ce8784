// Bytes per token as a daemon's pool counts them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/report.h"
#include "kernels/format/tile_shape.h"
#include "tessera/v1/tessera.pb.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

// The tenant's books once the daemon is at rest: no job waits or runs, and nothing that was
// replaced waits for readers.
absl::StatusOr<v1::TenantStats> SettledStats(client::Worker& worker);

std::uint64_t UsedBytes(const v1::TenantStats& stats, const std::string& tag);

// Starts a daemon, has a lane of one full segment compressed to this shape, and adds what the pool
// then holds for it: tiles and rotations.
absl::Status AddPoolGauge(const kernels::TileShape& tile, Report& report);

}  // namespace tessera::cli::bench
