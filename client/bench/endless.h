// Endless generation under LaCache: pool bytes after the first tokens and at the end.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "client/tools/report.h"

namespace tessera::cli::bench {

absl::Status MeasureEndless(std::uint64_t tokens, Report& report);

}  // namespace tessera::cli::bench
