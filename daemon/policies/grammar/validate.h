// Checks policies: their terms against each other, their values, and their fit to a model.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::policies {

// Checks the combination of terms, before they are applied. INVALID_ARGUMENT names the position in
// the text, the terms and the reason.
absl::Status CheckTogether(std::span<const Term> terms);

// Checks the policy independently of a model. INVALID_ARGUMENT names options as users write them.
absl::Status Validate(const Policy& policy);

// Checks the policy for a layer. Every candidate value of a list must be possible; otherwise one of
// them would be skipped without notice.
absl::Status CheckFor(const Policy& policy, const kernels::LayerGeometry& geometry);

// Checks the policy for a model as a whole.
absl::Status CheckForModel(const Policy& policy, const ModelFacts& model);

}  // namespace tessera::policies
