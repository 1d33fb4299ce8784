// How many tokens a prompt needs before a policy drops or merges anything.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

// Prompts of up to this many tokens are always kept whole. 0: the policy drops nothing.
std::uint64_t KeepsUpTo(const Policy& policy);

// For a refusal with LeavesWhole: the number of tokens that would be enough; 0: unknown.
std::uint64_t TokensEnoughFor(const absl::Status& refusal);

}  // namespace tessera::policies
