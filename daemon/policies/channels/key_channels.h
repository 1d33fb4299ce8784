// Decides which key channels a lane keeps, the same for all of its tokens (ThinK).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// By kv head: the kept channels, ascending; KeptKeyChannels of them.
using ChannelDecision = std::vector<std::vector<std::uint32_t>>;

// Decides at the end of a prompt, from all of its keys and its newest queries. The policy must have
// key_channels. FAILED_PRECONDITION: these queries were not observed.
absl::StatusOr<ChannelDecision> DecideKeyChannels(const Policy& policy, const LayerView& view);

}  // namespace tessera::policies
