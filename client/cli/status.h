// Renders the state of a daemon: text for `status` and `top`, JSON for programs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/tools/admin.h"

namespace tessera::cli {

// The state of a daemon at one moment.
struct Look {
  v1::StatsResponse stats;
  v1::ListSessionsResponse sessions;
  v1::ListSequencesResponse sequences;
};
absl::StatusOr<Look> ReadDaemonState(Admin& admin, std::uint32_t sequence_limit);

// With an earlier state `before`, taken `seconds` ago, counters are shown as rates. `before` may be
// null.
std::string RenderText(const Look& look, const Look* before, double seconds,
                       std::size_t sequence_rows);
std::string RenderJson(const Look& look);

}  // namespace tessera::cli
