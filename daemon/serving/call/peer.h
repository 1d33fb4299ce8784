// Who made a call: the process behind a Unix connection, and the trace that the call belongs to.
#pragma once

#include <grpcpp/server_context.h>

#include <optional>
#include <string>
#include <string_view>

#include "daemon/platform/unix_socket.h"

namespace tessera::serving {

// Whether the call came over one of the daemon's Unix sockets.
bool IsLocal(const grpc::ServerContextBase& context);

// The process that made the connection, as the kernel reported it then; nullopt over TCP, and if
// the connection is gone.
std::optional<PeerCredentials> CallerProcess(const grpc::ServerContextBase& context);

// The trace id of W3C trace context metadata ("traceparent"): 32 hexadecimal digits. Empty: the
// call has none, or it is malformed.
std::string TraceIdOf(const grpc::ServerContextBase& context);
std::string_view TraceIdIn(std::string_view traceparent);

}  // namespace tessera::serving
