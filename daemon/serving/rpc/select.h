// Select: the entries that Attend would read of a sequence, chosen on the same LaneViews.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::Status Select(const Services& services, const Caller& caller,
                    const v1::SelectRequest& request, v1::SelectResponse& response);

}  // namespace tessera::serving
