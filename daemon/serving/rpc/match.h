// Match: a call that may wait for minutes, and holds no thread while it does.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// A reactor for one call; owns itself.
grpc::ServerUnaryReactor* NewMatchReactor(Services& services, const v1::MatchRequest& request,
                                          v1::MatchResponse& response);

}  // namespace tessera::serving
