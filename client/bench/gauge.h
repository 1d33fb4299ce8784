// Bytes per token, from a daemon's own accounts of its pool.
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

// The stats of the only tenant once the daemon is idle: no compaction job is queued or running, and
// no replaced tile waits for readers. DEADLINE_EXCEEDED after 5 seconds.
absl::StatusOr<v1::TenantStats> SettledStats(client::Worker& worker);

std::uint64_t UsedBytes(const v1::TenantStats& stats, const std::string& tag);

// Starts a daemon, compresses a lane of one full segment to this shape, and adds a row with the
// pool bytes of its tiles and rotations.
absl::Status AddPoolGauge(const kernels::TileShape& tile, Report& report);

}  // namespace tessera::cli::bench
