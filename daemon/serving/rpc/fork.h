// Fork: of a sequence or of a prefix.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// The new sequence, under `own`, or its parent's policy.
absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkParent(const Services& services,
                                                            const Caller& caller,
                                                            const v1::ForkRequest& request,
                                                            std::optional<policies::Policy> own);

}  // namespace tessera::serving
