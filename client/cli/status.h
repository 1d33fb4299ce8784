// How a daemon's state is shown: as text for `status` and `top`, as JSON for programs.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/tools/admin.h"

namespace tessera::cli {

// One look at a daemon.
struct Look {
  v1::StatsResponse stats;
  v1::ListSessionsResponse sessions;
  v1::ListSequencesResponse sequences;
};
absl::StatusOr<Look> TakeLook(Admin& admin, std::uint32_t sequence_limit);

// `before` (or null) and the seconds since then give rates.
std::string RenderText(const Look& look, const Look* before, double seconds,
                       std::size_t sequence_rows);
std::string RenderJson(const Look& look);

}  // namespace tessera::cli
