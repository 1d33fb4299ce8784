// Match. A call may wait for minutes; it holds no thread while it waits.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// Creates the reactor of one call, which deletes itself when the call is done and counts it in
// `rpc`.
grpc::ServerUnaryReactor* NewMatchReactor(Services& services, metrics::RpcMethod& rpc,
                                          const v1::MatchRequest& request,
                                          v1::MatchResponse& response);

}  // namespace tessera::serving
