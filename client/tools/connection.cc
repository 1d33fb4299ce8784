#include "client/tools/connection.h"

#include <string>
#include <utility>

#include "client/gpu/wanted_device.h"
#include "client/rpc/daemon_directory.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

std::vector<Flags::Spec> ConnectionFlags(Connects connects, bool attaches) {
  constexpr FlagKind kKind = FlagKind::kConnection;
  if (connects == Connects::kNowhere) return {};
  std::vector<Flags::Spec> flags;
  if (connects == Connects::kToDaemon) {
    flags.push_back({"address", "ADDRESS",
                     "Address of the daemon: unix:PATH, unix:DIRECTORY/ or HOST:PORT.",
                     client::kDefaultAddress, kKind, "TESSERA_ADDRESS"});
  } else {
    // Not from the environment: load for a test must not reach a daemon unasked.
    flags.push_back({"address", "ADDRESS",
                     "Address of the daemon: unix:PATH, unix:DIRECTORY/ or HOST:PORT.", "", kKind});
  }
  flags.push_back({"device", "DEVICE",
                   "Device whose daemon to use, with the address of a directory: its UUID, the "
                   "beginning of one, or cuda:N.",
                   "", kKind});
  if (attaches) {
    flags.push_back({"token", "TOKEN",
                     "Token of the tenant, for commands that attach as a worker does. Other users "
                     "of the machine can see it among the processes: prefer the variable.",
                     "", kKind, "TESSERA_TOKEN"});
  }
  flags.push_back({"tls", "", "Use TLS. The other --tls flags imply it.", "", kKind});
  flags.push_back({"tls-ca", "FILE", "CA certificates to trust. Unset: the system's.", "", kKind});
  flags.push_back(
      {"tls-certificate", "FILE", "Client certificate, if the daemon asks for one.", "", kKind});
  flags.push_back({"tls-key", "FILE", "Private key of the client certificate.", "", kKind});
  flags.push_back({"tls-name", "NAME",
                   "Name to expect in the daemon's certificate. Unset: the host.", "", kKind});
  return flags;
}

Door ConnectionOf(const Flags& flags) {
  Door door = {.address = flags.Get("address"),
               .device = flags.Get("device"),
               .tls = std::nullopt,
               .token = ""};
  const client::TlsOptions tls = {.ca_file = flags.Get("tls-ca"),
                                  .certificate_file = flags.Get("tls-certificate"),
                                  .key_file = flags.Get("tls-key"),
                                  .server_name = flags.Get("tls-name")};
  for (const char* name : {"tls", "tls-ca", "tls-certificate", "tls-key", "tls-name"}) {
    if (flags.Has(name)) door.tls = tls;
  }
  // A token that comes from a file ends in a newline, and no token contains white space.
  if (flags.Declares("token")) door.token = std::string(Trim(flags.Get("token")));
  return door;
}

absl::Status CheckNoDevice(const Door& door) {
  if (door.device.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("--device=", door.device, " needs --address=unix:DIRECTORY/"));
}

absl::StatusOr<std::string> AddressOf(const Door& door) {
  if (!client::IsDirectoryAddress(door.address)) {
    if (door.device.empty()) return door.address;
    return absl::InvalidArgumentError(
        Concat("--device picks one of the sockets in a directory, and --address=", door.address,
               " is not one; write it as unix:DIRECTORY/"));
  }
  client::WantedDevice wanted;  // not this process's own: an operator may mean any
  if (!door.device.empty()) {
    absl::StatusOr<client::WantedDevice> found =
        client::FindWantedDevice(client::GpuPlatform::System(), door.device);
    if (!found.ok()) return found.status();
    wanted = *std::move(found);
  }
  const absl::StatusOr<client::DaemonSocket> socket = client::PickDaemon(door.address, wanted);
  if (!socket.ok()) return socket.status();
  return socket->address();
}

}  // namespace tessera::cli
