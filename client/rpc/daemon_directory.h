// A directory in which several daemons of a node listen, one per device. The name of a socket
// contains the UUID of its device, as in "GPU-....sock", and a client picks the socket by it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/wanted_device.h"
#include "daemon/platform/device_uuid.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

struct DaemonSocket {
  std::string path;
  std::optional<DeviceUuid> uuid;  // in the name of the file

  std::string address() const { return "unix:" + path; }
};

// Whether the address names a directory: "unix:DIRECTORY/", or "unix:PATH" if PATH is one.
bool IsDirectoryAddress(const std::string& address);

// Lists the sockets of daemons in the directory by name, dead ones included. NOT_FOUND if there is
// no such directory, PERMISSION_DENIED if this process may not read it.
absl::StatusOr<std::vector<DaemonSocket>> ListDaemons(const std::string& address);

// Picks the socket of the wanted device, or the only one if the device is unknown. A socket without
// a UUID in its name may belong to any device, and is picked if it is the only candidate. Sockets
// of daemons that have died are ignored. Errors list the candidates: UNAVAILABLE if there is none
// now, FAILED_PRECONDITION if there are several.
absl::StatusOr<DaemonSocket> PickDaemon(const std::string& address, const WantedDevice& wanted);

// FAILED_PRECONDITION if the daemon serves another device than the wanted one.
absl::Status CheckDevice(const v1::Welcome& welcome, const WantedDevice& wanted);

}  // namespace tessera::client
