#include "client/cli/daemons.h"

#include <optional>
#include <utility>

#include "client/json/message_json.h"
#include "client/tools/admin.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

absl::StatusOr<v1::StatsResponse> StatsOf(const Door& door, std::chrono::seconds patience) {
  absl::StatusOr<Admin> admin = Admin::At(door, patience);
  if (!admin.ok()) return admin.status();
  return admin->Stats();
}

std::string UuidOf(const DaemonLook& daemon) {
  if (daemon.stats.ok() && !daemon.stats->device_uuid().empty()) return daemon.stats->device_uuid();
  return daemon.socket.uuid.has_value() ? daemon.socket.uuid->ToString() : "";
}

}  // namespace

absl::StatusOr<std::vector<DaemonLook>> ReadDaemons(const Door& door,
                                                    std::chrono::seconds patience) {
  if (!client::IsDirectoryAddress(door.address)) {
    return absl::InvalidArgumentError(Concat(
        "--all needs the address of a directory, unix:DIRECTORY/; ", door.address, " is not one"));
  }
  if (!door.device.empty()) {
    return absl::InvalidArgumentError("--all and --device exclude each other");
  }
  const absl::StatusOr<std::vector<client::DaemonSocket>> sockets =
      client::ListDaemons(door.address);
  if (!sockets.ok()) return sockets.status();
  if (sockets->empty()) {
    return absl::UnavailableError(Concat(door.address, " has no socket: no daemon runs there"));
  }
  std::vector<DaemonLook> daemons;
  for (const client::DaemonSocket& socket : *sockets) {
    Door one = door;
    one.address = socket.address();
    daemons.push_back({socket, StatsOf(one, patience)});
  }
  return daemons;
}

Table DaemonTable(const std::vector<DaemonLook>& daemons) {
  Table table({{.title = "device", .align = Align::kLeft},
               // A beginning is enough for --device.
               {.title = "uuid", .align = Align::kLeft, .least = 12},
               {.title = "model", .align = Align::kLeft, .leave_out = 2},
               {.title = "memory"},
               {.title = "limit"},
               {.title = "sessions"},
               {.title = "up", .leave_out = 1},
               {.title = "state", .align = Align::kLeft}});
  for (const DaemonLook& daemon : daemons) {
    const std::string uuid = UuidOf(daemon);
    if (!daemon.stats.ok()) {
      table.Add({"-", uuid.empty() ? "-" : uuid, "-", "-", "-", "-", "-", "no answer"});
      continue;
    }
    const v1::StatsResponse& stats = *daemon.stats;
    table.Add({stats.device(), uuid.empty() ? "-" : uuid,
               stats.device_model().empty() ? "-" : stats.device_model(),
               FormatBytes(stats.pool_reserved_bytes()), FormatBytes(stats.pool_limit_bytes()),
               Concat(stats.sessions()), Age(stats.uptime_seconds()),
               stats.draining() ? "draining" : "serving"});
  }
  return table;
}

std::string DaemonsText(const std::vector<DaemonLook>& daemons, std::size_t columns) {
  std::string text = DaemonTable(daemons).Render(0, columns);
  for (const DaemonLook& daemon : daemons) {
    if (!daemon.stats.ok()) Append(text, AsStringView(daemon.stats.status().message()), "\n");
  }
  return text;
}

std::string DaemonsJson(const std::vector<DaemonLook>& daemons) {
  std::string items;
  for (const DaemonLook& daemon : daemons) {
    const bool ok = daemon.stats.ok();
    Append(items, items.empty() ? "" : ",", "{\"address\":", JsonString(daemon.socket.address()),
           ",\"device_uuid\":", JsonString(UuidOf(daemon)), ",\"error\":",
           JsonString(ok ? "" : std::string(AsStringView(daemon.stats.status().message()))),
           ",\"stats\":", ok ? client::JsonOf(*daemon.stats) : "null", "}");
  }
  return Concat("{\"daemons\":[", items, "]}\n");
}

}  // namespace tessera::cli
