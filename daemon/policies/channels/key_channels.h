// Which key channels stay, where a policy has the same ones go from every token (ThinK).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// By kv head: the channels that stay, ascending, KeptKeyChannels of them.
using ChannelDecision = std::vector<std::vector<std::uint32_t>>;

// At the end of a prompt, from all of its keys and its newest queries. Only of policies that have
// key_channels. FAILED_PRECONDITION where these queries were not shown.
absl::StatusOr<ChannelDecision> DecideKeyChannels(const Policy& policy, const LayerView& view);

}  // namespace tessera::policies
