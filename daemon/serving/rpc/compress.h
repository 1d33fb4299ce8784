// Compress: from a request's packing and rotations to the cache's packing.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

struct PolicyCompression {
  std::shared_ptr<cache::Sequence> sequence;
  // Its worker asks, and has shown what it will: what the policy misses then is an error. Else what
  // has not been shown yet is left to the next time.
  bool by_worker = false;
  // Its worker does not wait for it, and may be in a step.
  bool amid_steps = false;
  // Whether it is an error that the policy does nothing with so few tokens (policies::LeavesWhole).
  bool all_or_nothing = false;
  cache::GoOn go_on;  // asked now and then
};

// As the sequence's policy says, and waits for the end of it.
absl::Status CompressByPolicy(const Services& services, const PolicyCompression& compression,
                              const v1::CompressRequest& request, v1::CompressResponse& response);

absl::Status Compress(const Services& services, const Caller& caller,
                      const v1::CompressRequest& request, v1::CompressResponse& response);

}  // namespace tessera::serving
