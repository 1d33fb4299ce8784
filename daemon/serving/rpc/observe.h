// Observe: copies and checks what a worker observed, and gives it to the sequence's token policy.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::Status Observe(const Services& services, const Caller& caller,
                     const v1::ObserveRequest& request, v1::ObserveResponse& response);

}  // namespace tessera::serving
