// Converts grpc::Status to absl::Status.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace tessera::client {

// Codes have the same numbers, and the message is passed on unchanged. The error's cause becomes a
// payload (daemon/base/error_cause.h). Malformed details are ignored.
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace tessera::client
