// Whether a policy can go on with what a sequence holds: what earlier policies have left there.
#pragma once

#include "absl/status/status.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/policies/policy.h"

namespace tessera::compaction {

// FAILED_PRECONDITION says where it cannot: Compress would be refused once something has to go.
absl::Status CheckFitsRows(const policies::Policy& policy, const cache::Sequence& sequence);

}  // namespace tessera::compaction
