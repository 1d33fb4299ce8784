// All daemons of a node, one per device, for `status --all` and `top --all`.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/rpc/daemon_directory.h"
#include "client/tools/connection.h"
#include "client/tools/table.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::cli {

// What one of the daemons answered, or why it did not.
struct DaemonLook {
  client::DaemonSocket socket;
  absl::StatusOr<v1::StatsResponse> stats;
};

// Asks the daemon behind each socket of the door's directory, by the name of the socket.
// UNAVAILABLE if the directory has none, INVALID_ARGUMENT if the address is not a directory.
absl::StatusOr<std::vector<DaemonLook>> ReadDaemons(const Door& door,
                                                    std::chrono::seconds patience);

// One row per daemon.
Table DaemonTable(const std::vector<DaemonLook>& daemons);
// The table, and a line for each daemon that did not answer. `columns` 0: no limit.
std::string DaemonsText(const std::vector<DaemonLook>& daemons, std::size_t columns);
// One JSON object on one line.
std::string DaemonsJson(const std::vector<DaemonLook>& daemons);

}  // namespace tessera::cli
