// The border between our statuses and gRPC's.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace tessera::serving {

// The codes are the same numbers; the message travels as it is.
inline grpc::Status ToGrpc(const absl::Status& status) {
  return status.ok() ? grpc::Status::OK
                     : grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                                    std::string(status.message().data(), status.message().size()));
}

}  // namespace tessera::serving
