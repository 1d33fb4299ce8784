// How SemantiCache decides about a layer.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/policies/token_options.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

inline constexpr std::string_view kSemantiCacheName = "semanticache";

absl::StatusOr<LayerDecision> DecideClusters(const SemantiCachePolicy& cache,
                                             const LayerView& view);

}  // namespace tessera::policies
