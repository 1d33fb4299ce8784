// The Compress RPC: compresses by the sequence's policy, or by a packing and rotations in the
// request.
#pragma once

#include "absl/status/status.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

struct PolicyCompression {
  std::shared_ptr<cache::Sequence> sequence;
  // The worker calls and has sent all of its observations, so a missing one is an error. Otherwise
  // tokens with missing observations are left for the next compression.
  bool by_worker = false;
  // The worker does not wait for the call and may be in a step.
  bool amid_steps = false;
  // Whether too few tokens for the policy are an error (policies::LeavesWhole).
  bool all_or_nothing = false;
  cache::GoOn go_on;  // called regularly; an error ends the wait
};

// Compresses by the sequence's policy, and waits until it is done. If go_on returns an error, that
// is returned, and the jobs continue.
absl::Status CompressByPolicy(const Services& services, const PolicyCompression& compression,
                              const v1::CompressRequest& request, v1::CompressResponse& response);

absl::Status Compress(const Services& services, const Caller& caller,
                      const v1::CompressRequest& request, v1::CompressResponse& response);

}  // namespace tessera::serving
