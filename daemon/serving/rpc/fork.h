// Fork of a sequence or a prefix.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// Creates the fork. `own` is its policy; nullopt: the parent's.
absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkParent(const Services& services,
                                                            const Caller& caller,
                                                            const v1::ForkRequest& request,
                                                            std::optional<policies::Policy> own);

}  // namespace tessera::serving
