// Reads the JSON of an earlier run, for `tessera bench NAME --baseline=FILE`.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/tools/report.h"

namespace tessera::cli::bench {

// NOT_FOUND without the file. INVALID_ARGUMENT if it is not the --json output of `benchmark`.
absl::StatusOr<EarlierRun> ReadEarlierRun(const std::string& path, std::string_view benchmark);

}  // namespace tessera::cli::bench
