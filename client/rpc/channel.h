// The connection to a daemon, in the clear or by TLS.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "tessera/options.h"

namespace tessera::client {

// "unix:PATH", or "HOST:PORT", for which alone there is TLS. Connects when it is first used.
// INVALID_ARGUMENT names an address that is neither, or a file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const std::optional<TlsOptions>& tls,
                                                           grpc::ChannelArguments arguments);

// Whether it is the address of a Unix socket.
bool IsUnixAddress(const std::string& address);
// INVALID_ARGUMENT where it is neither that nor host and port.
absl::Status CheckAddress(const std::string& address);

}  // namespace tessera::client
