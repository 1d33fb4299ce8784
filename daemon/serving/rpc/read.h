// Read: the rows of a layer, decoded as attention sees them.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::Status Read(const Services& services, const Caller& caller, const v1::ReadRequest& request,
                  v1::ReadResponse& response);

}  // namespace tessera::serving
