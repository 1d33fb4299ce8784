// Compress: from a request's packing and rotations to the cache's packing.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/caller.h"
#include "daemon/serving/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// As the sequence's policy says, and waits for the end of it, asking `go_on` now and then.
absl::Status CompressByPolicy(const Services& services, const cache::GoOn& go_on,
                              const v1::CompressRequest& request,
                              const std::shared_ptr<cache::Sequence>& sequence,
                              v1::CompressResponse& response);

absl::Status Compress(const Services& services, const Caller& caller,
                      const v1::CompressRequest& request, v1::CompressResponse& response);

}  // namespace tessera::serving
