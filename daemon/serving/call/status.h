// Converts absl::Status to grpc::Status.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace tessera::serving {

// Codes have the same numbers, and the message is passed on unchanged. The cause of an error
// (daemon/base/error_cause.h) goes into the details as v1::StatusDetails.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace tessera::serving
