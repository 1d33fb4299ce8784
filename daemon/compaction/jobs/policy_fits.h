// Whether a policy can be applied to a model, and to what earlier policies have left of a sequence.
#pragma once

#include "absl/status/status.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/policies/policy.h"

namespace tessera::compaction {

// INVALID_ARGUMENT names the layer, or what the model lacks.
absl::Status CheckFitsModel(const policies::Policy& policy, const cache::Model& model);

// FAILED_PRECONDITION names what the policy cannot work with, INVALID_ARGUMENT a book that the
// daemon does not have for the model. Without this check Compress would fail later, at the first
// entry that must go.
absl::Status CheckFitsRows(const policies::Policy& policy, const cache::Sequence& sequence);

}  // namespace tessera::compaction
