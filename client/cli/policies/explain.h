// The explanation of a policy, for `tessera explain` and `tessera policies check`.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/tools/flags.h"

namespace tessera::cli {

// The model and the prompt.
std::vector<Flags::Spec> ExplainFlags();

// Prints the explanation. INVALID_ARGUMENT: the policy is refused, for any model or for this one.
absl::Status ExplainPolicy(const std::string& text, const Flags& flags);

}  // namespace tessera::cli
