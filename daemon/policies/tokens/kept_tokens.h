// How many tokens of a prompt a policy keeps, from its options alone.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

// Entries per lane, averaged over the layers.
struct KeptTokens {
  std::uint64_t least = 0;
  std::uint64_t most = 0;  // differs from `least` if the text or the keys decide, too
};

// For a prompt that begins the sequence. INVALID_ARGUMENT: the budget cannot be met with so few
// tokens; see TokensEnoughFor.
absl::StatusOr<KeptTokens> KeptTokensOf(const Policy& policy, std::uint64_t tokens);

}  // namespace tessera::policies
