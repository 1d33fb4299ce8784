// Publish: makes the start of a sequence a prefix, of which there is only one copy.
#pragma once

#include "absl/status/status.h"
#include "daemon/policies/policy.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// The scope in which the caller finds prefixes of this model and policy.
cache::PrefixScope ScopeOf(const Caller& caller, const cache::Model& model,
                           const policies::Policy& policy);

// Converts a field of milliseconds. INVALID_ARGUMENT names the field and the limit.
absl::StatusOr<Clock::Duration> ToDuration(std::string_view field, std::uint64_t ms,
                                           std::uint64_t most_ms);

absl::Status Publish(const Services& services, const Caller& caller,
                     const v1::PublishRequest& request, v1::PublishResponse& response);

}  // namespace tessera::serving
