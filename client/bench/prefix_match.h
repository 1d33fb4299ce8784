// Latency of Match among few and many published prefixes.
#pragma once

#include "absl/status/status.h"
#include "client/tools/report.h"

namespace tessera::cli::bench {

absl::Status MeasureMatch(bool quick, Report& report);

}  // namespace tessera::cli::bench
