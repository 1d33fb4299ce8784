// What a row of the registry adds where its system decides which tokens stay, or become one:
// functions of token_policy.h for it alone.
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
  // The others are only called where `is` says so.
  Needs (*needs)(const TokenPolicy& tokens);
  absl::StatusOr<LayerDecision> (*decide)(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory& memory);
  // Null: nothing happens while decoding.
  absl::StatusOr<LayerDecision> (*advance)(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t> held,
                                           LayerMemory& memory) = nullptr;
  // Null: each lane is decided about by itself.
  LanesAlike (*lanes_alike)(const TokenPolicy& tokens) = nullptr;
  // Null: keys keep their positions.
  bool (*moves_positions)(const TokenPolicy& tokens) = nullptr;
  // Null: keys are looked at, and merged, as they are stored.
  bool (*turns_keys_back)(const TokenPolicy& tokens) = nullptr;
  // Null: any model will do.
  absl::Status (*check_model)(const TokenPolicy& tokens, const ModelFacts& model) = nullptr;
};

template <typename System>
bool Is(const TokenPolicy& tokens) {
  return std::holds_alternative<System>(tokens);
}

// Of `read`: null where the policy has none, or another one.
template <typename System>
const System* TokensOf(const Policy& policy) {
  return policy.tokens.has_value() ? std::get_if<System>(&*policy.tokens) : nullptr;
}
template <typename System>
const System* MergingOf(const Policy& policy) {
  return policy.merging.has_value() ? std::get_if<System>(&*policy.merging) : nullptr;
}

// The row that serves them: every alternative has one.
const TermKind& KindOf(const TokenPolicy& tokens);

}  // namespace tessera::policies
