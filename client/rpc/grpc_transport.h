// The gRPC implementation of Connector and Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/gpu/wanted_device.h"
#include "client/rpc/transport.h"
#include "tessera/options.h"

namespace tessera::client {

// Where to connect: "unix:PATH", "HOST:PORT", or "unix:DIRECTORY/" with a socket per device.
struct GrpcTarget {
  std::string address;
  std::optional<TlsOptions> tls;
  WantedDevice device;  // with an empty UUID: any
};

// INVALID_ARGUMENT for any other address.
absl::StatusOr<std::unique_ptr<Connector>> NewGrpcConnector(GrpcTarget target);

}  // namespace tessera::client
