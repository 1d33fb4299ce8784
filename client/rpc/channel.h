// The gRPC channel to a daemon, with or without TLS.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tessera/options.h"

namespace tessera::client {

// `address` is "unix:PATH" or "HOST:PORT"; only the latter supports TLS. The channel connects on
// first use. INVALID_ARGUMENT names a bad address or a file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const std::optional<TlsOptions>& tls,
                                                           grpc::ChannelArguments arguments);

// What to do about a connection that failed, if its error tells a wrong use of TLS; else "". `tls`:
// the client used it. `error`: the message of gRPC.
std::string TlsHint(const std::string& address, bool tls, std::string_view error);

// Whether the address names a Unix socket.
bool IsUnixAddress(const std::string& address);
// INVALID_ARGUMENT if the address is neither "unix:PATH" nor "HOST:PORT".
absl::Status CheckAddress(const std::string& address);

}  // namespace tessera::client
