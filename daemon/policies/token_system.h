// The functions that a system which keeps or merges tokens adds to its registry row. Each
// implements the function of token_policy.h with the same purpose for that system.
#pragma once

#include <cstdint>
#include <span>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

struct TokenSystem {
  bool (*is)(const TokenPolicy& tokens);
  // All other functions are called only with a policy for which `is` is true.
  Needs (*needs)(const TokenPolicy& tokens);
  absl::StatusOr<LayerDecision> (*decide)(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory& memory);
  // Null: the system does nothing while decoding.
  absl::StatusOr<LayerDecision> (*advance)(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t> held,
                                           LayerMemory& memory) = nullptr;
  // Null: each lane has its own decision.
  LaneEquality (*lane_equality)(const TokenPolicy& tokens) = nullptr;
  // Null: keys keep their rotary positions.
  bool (*moves_positions)(const TokenPolicy& tokens) = nullptr;
  // Null: keys are compared and merged as stored.
  bool (*uses_unrotated_keys)(const TokenPolicy& tokens) = nullptr;
  // Null: every model is supported.
  absl::Status (*check_model)(const TokenPolicy& tokens, const ModelFacts& model) = nullptr;
};

template <typename System>
bool Is(const TokenPolicy& tokens) {
  return std::holds_alternative<System>(tokens);
}

// For `read`: null if the policy has another system, or none.
template <typename System>
const System* TokensOf(const Policy& policy) {
  return policy.tokens.has_value() ? std::get_if<System>(&*policy.tokens) : nullptr;
}
template <typename System>
const System* MergingOf(const Policy& policy) {
  return policy.merging.has_value() ? std::get_if<System>(&*policy.merging) : nullptr;
}

// The registry row of a token policy. Every alternative of TokenPolicy has one.
const TermKind& KindOf(const TokenPolicy& tokens);

}  // namespace tessera::policies
