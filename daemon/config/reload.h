// Compares a configuration that is read anew with the running one: which fields have changed, and
// which of them a running daemon can apply.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "daemon/config/validate.h"

namespace tessera::config {

struct ReloadPlan {
  // The running configuration, with the reloadable fields of the new one. Valid.
  Config config;
  // Names of the fields of DaemonConfig that differ.
  std::vector<std::string> applied;        // reloadable: `config` has their new values
  std::vector<std::string> needs_restart;  // `config` has their running values
};

// `fresh` is complete and valid, as LoadConfig returns it. INVALID_ARGUMENT if its reloadable
// fields do not fit the running values of the others.
absl::StatusOr<ReloadPlan> PlanReload(const Config& running, const Config& fresh,
                                      const DeviceMemory& memory);

// Whether a reload can apply a change of this field. The comment of each such field in config.proto
// says so.
bool IsReloadable(std::string_view field);

}  // namespace tessera::config
