// The gRPC implementation of Connector and Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/rpc/transport.h"
#include "tessera/options.h"

namespace tessera::client {

// "unix:PATH" or "HOST:PORT". INVALID_ARGUMENT for anything else.
absl::StatusOr<std::unique_ptr<Connector>> NewGrpcConnector(const std::string& address,
                                                            const std::optional<TlsOptions>& tls);

}  // namespace tessera::client
