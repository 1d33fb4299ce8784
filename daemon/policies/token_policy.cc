#include "daemon/policies/token_policy.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/policies/token_system.h"

namespace tessera::policies {
namespace {

// Null where the policy has no say about tokens.
const TokenSystem* SystemOf(const Policy& policy) {
  return policy.tokens.has_value() ? KindOf(*policy.tokens).tokens : nullptr;
}

void CheckView(const LayerView& view) {
  TESSERA_CHECK(view.lanes.size() == view.geometry.kv_heads && !view.lanes.empty(),
                "lanes of other heads");
  for (const LaneEntries& lane : view.lanes) {
    TESSERA_CHECK(lane.positions.size() == lane.count, "positions of other entries");
  }
}

}  // namespace

const TermKind& KindOf(const TokenPolicy& tokens) {
  for (const TermKind* kind : TermKinds()) {
    if (kind->tokens != nullptr && kind->tokens->is(tokens)) return *kind;
  }
  TESSERA_CHECK(false, "a token policy without a row");
  __builtin_unreachable();
}

Needs NeedsOf(const Policy& policy) {
  const TokenSystem* const system = SystemOf(policy);
  Needs needs = system == nullptr ? Needs{} : system->needs(*policy.tokens);
  if (policy.key_channels.has_value()) {
    needs.last_queries = std::max(needs.last_queries, policy.key_channels->window);
  }
  return needs;
}

bool Continues(const Policy& policy) {
  const TokenSystem* const system = SystemOf(policy);
  return system != nullptr && system->advance != nullptr;
}

bool MovesPositions(const Policy& policy) {
  const TokenSystem* const system = SystemOf(policy);
  return system != nullptr && system->moves_positions != nullptr &&
         system->moves_positions(*policy.tokens);
}

bool TurnsKeysBack(const Policy& policy) {
  const TokenSystem* const system = SystemOf(policy);
  return system != nullptr && system->turns_keys_back != nullptr &&
         system->turns_keys_back(*policy.tokens);
}

bool Merges(const Policy& policy) {
  const TokenSystem* const system = SystemOf(policy);
  return system != nullptr && system->merges;
}

std::uint32_t DecidesFor(const Policy& policy, std::uint32_t layer) {
  const TokenSystem* const system = SystemOf(policy);
  if (system == nullptr || system->decides_for == nullptr) return layer;
  return system->decides_for(*policy.tokens, layer);
}

absl::StatusOr<LayerDecision> Decide(const Policy& policy, const LayerView& view,
                                     LayerMemory& memory) {
  const TokenSystem* const system = SystemOf(policy);
  TESSERA_CHECK(system != nullptr, policy.text);
  CheckView(view);
  return system->decide(*policy.tokens, view, memory);
}

absl::StatusOr<LayerDecision> Advance(const Policy& policy, const LayerView& view,
                                      std::span<const std::uint64_t> held, LayerMemory& memory) {
  const TokenSystem* const system = SystemOf(policy);
  TESSERA_CHECK(system != nullptr && system->advance != nullptr, policy.text);
  CheckView(view);
  TESSERA_CHECK(held.size() == view.lanes.size(), "counts of other lanes");
  return system->advance(*policy.tokens, view, held, memory);
}

std::string NeedsText(const Needs& needs) {
  std::string text;
  const auto add = [&text](const auto&... parts) {
    Append(text, text.empty() ? "" : "; ", parts...);
  };
  if (needs.last_queries == 1 && needs.last_share == 0) {
    add("the queries of the newest token of a prompt");
  } else if (needs.last_queries != 0 && needs.last_share == 0) {
    add("the queries of the newest ", needs.last_queries, " tokens of a prompt");
  } else if (needs.last_queries != 0 || needs.last_share != 0) {
    add("the queries of the newest tokens of a prompt, ", needs.last_share,
        " of them and at least ", needs.last_queries);
  }
  if (needs.norm_share != 0) {
    add("of each query head the queries of the largest norm, ", needs.norm_share, " of them");
  }
  if (needs.attention_sums) add("the attention that a prompt's queries pay to each key");
  if (needs.token_ids) add("token ids");
  if (needs.decode_queries) add("the queries of decoded tokens");
  return text.empty() ? "nothing" : text;
}

}  // namespace tessera::policies
