// Compress: from a request's packing and rotations to the cache's packing.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/caller.h"
#include "daemon/serving/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::Status Compress(const Services& services, const Caller& caller,
                      const v1::CompressRequest& request, v1::CompressResponse& response);

}  // namespace tessera::serving
