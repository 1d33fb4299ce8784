// Match. A call may wait for minutes; it holds no thread while it waits.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "daemon/serving/call/services.h"
#include "daemon/serving/call/unary_call.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// Starts a call that arrived on the wire. It deletes itself when the call is done, and is counted
// in `rpc`.
grpc::ServerUnaryReactor* StartMatch(const CallHost& host, metrics::RpcMethod& rpc,
                                     const UnaryCall::Wire& wire);

// The same for callers in this process. `response` must live until the call is done.
grpc::ServerUnaryReactor* NewMatchReactor(Services& services, metrics::RpcMethod& rpc,
                                          const v1::MatchRequest& request,
                                          v1::MatchResponse& response);

}  // namespace tessera::serving
