// What is wrong with a policy: in itself, and for a layer of a model.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::policies {

// Whether the terms go together, before they are applied. INVALID_ARGUMENT names the character, the
// terms and the reason.
absl::Status CheckTogether(std::span<const Term> terms);

// Whether the policy can be carried out for some layer. INVALID_ARGUMENT names options as they are
// written.
absl::Status Validate(const Policy& policy);

// Whether it can for this one. Every candidate must: one that cannot be would be passed over in
// silence.
absl::Status CheckFor(const Policy& policy, const kernels::LayerGeometry& geometry);

// Whether it can for such a model, all layers together.
absl::Status CheckForModel(const Policy& policy, const ModelFacts& model);

}  // namespace tessera::policies
