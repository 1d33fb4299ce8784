// How many tokens it takes before a policy drops or merges anything.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

// Of a prompt of so many tokens, or fewer, all stay, whatever they are. 0: the policy drops
// nothing.
std::uint64_t KeepsUpTo(const Policy& policy);

// Of a refusal that LeavesWhole: so many tokens in all would not be refused; 0: no number is known.
std::uint64_t TokensEnoughFor(const absl::Status& refusal);

}  // namespace tessera::policies
