// Attend over RPC. It builds the same LaneViews as a mapped worker and runs the same kernels.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::Status Attend(const Services& services, const Caller& caller,
                    const v1::AttendRequest& request, v1::AttendResponse& response);

}  // namespace tessera::serving
