// The gRPC channel to a daemon, with or without TLS.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "tessera/options.h"

namespace tessera::client {

// `address` is "unix:PATH" or "HOST:PORT"; only the latter supports TLS. The channel connects on
// first use. INVALID_ARGUMENT names a bad address or a file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const std::optional<TlsOptions>& tls,
                                                           grpc::ChannelArguments arguments);

// Whether the address names a Unix socket.
bool IsUnixAddress(const std::string& address);
// INVALID_ARGUMENT if the address is neither "unix:PATH" nor "HOST:PORT".
absl::Status CheckAddress(const std::string& address);

}  // namespace tessera::client
