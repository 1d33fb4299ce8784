#include "daemon/policies/token_policy.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/policies/kept_entries.h"
#include "daemon/policies/token_system.h"

namespace tessera::policies {
namespace {

// Null: the policy neither keeps nor merges tokens.
const TokenSystem* Selector(const Policy& policy) {
  return policy.tokens.has_value() ? KindOf(*policy.tokens).tokens : nullptr;
}
const TokenSystem* Merger(const Policy& policy) {
  return policy.merging.has_value() ? KindOf(*policy.merging).tokens : nullptr;
}

void CheckView(const LayerView& view) {
  TESSERA_CHECK(view.lanes.size() == view.geometry.kv_heads && !view.lanes.empty(),
                "the view does not have one lane per kv head");
  for (const LaneEntries& lane : view.lanes) {
    TESSERA_CHECK(lane.positions.size() == lane.count,
                  "the view does not have one position per entry");
  }
}

}  // namespace

std::uint64_t LayerView::StepEnd(std::uint64_t position) const {
  const auto behind = std::ranges::upper_bound(prompts, position, {}, &TokenSpan::begin);
  if (behind == prompts.begin()) return position + 1;
  return std::max(std::prev(behind)->end, position + 1);
}

void LayerMemory::CutTo(std::uint64_t tokens, std::uint64_t decided_until) {
  for (ChunkEnds& of_lane : boundaries) of_lane.CutTo(tokens);
  clustered_until = std::min(clustered_until, tokens);
  if (decided_until == 0) *this = {.boundaries = std::move(boundaries)};
}

const TermKind& KindOf(const TokenPolicy& tokens) {
  for (const TermKind* kind : TermKinds()) {
    if (kind->tokens != nullptr && kind->tokens->is(tokens)) return *kind;
  }
  TESSERA_CHECK(false, "a token policy has no registry row");
  __builtin_unreachable();
}

Needs NeedsOf(const Policy& policy) {
  const TokenSystem* const selector = Selector(policy);
  const TokenSystem* const merger = Merger(policy);
  Needs needs = selector == nullptr ? Needs{} : selector->needs(*policy.tokens);
  if (merger != nullptr) needs.token_ids = merger->needs(*policy.merging).token_ids;
  if (policy.key_channels.has_value()) {
    needs.last_queries = std::max(needs.last_queries, policy.key_channels->window);
  }
  return needs;
}

bool Continues(const Policy& policy) {
  const TokenSystem* const selector = Selector(policy);
  return selector != nullptr && selector->advance != nullptr;
}

bool LearnsTheSame(const Policy& a, const Policy& b) {
  return Continues(a) && NeedsOf(a).decode_queries && Selector(a) == Selector(b);
}

LaneEquality NeededLaneEquality(const Policy& policy) {
  const auto needs = [](const TokenSystem* system, const std::optional<TokenPolicy>& tokens) {
    return system == nullptr || system->lane_equality == nullptr ? LaneEquality::kNothing
                                                                 : system->lane_equality(*tokens);
  };
  return std::max(needs(Selector(policy), policy.tokens), needs(Merger(policy), policy.merging));
}

bool MovesPositions(const Policy& policy) {
  const TokenSystem* const selector = Selector(policy);
  return selector != nullptr && selector->moves_positions != nullptr &&
         selector->moves_positions(*policy.tokens);
}

bool UsesUnrotatedKeys(const Policy& policy) {
  const TokenSystem* const merger = Merger(policy);
  return merger != nullptr && merger->uses_unrotated_keys != nullptr &&
         merger->uses_unrotated_keys(*policy.merging);
}

bool Merges(const Policy& policy) { return policy.merging.has_value(); }

std::uint32_t DecidesFor(const Policy& policy, std::uint32_t layer) {
  const TokenSystem* const selector = Selector(policy);
  return selector == nullptr ? layer : layer - layer % selector->needs(*policy.tokens).layers_alike;
}

absl::StatusOr<LayerDecision> Decide(const Policy& policy, const LayerView& view,
                                     LayerMemory& memory) {
  const TokenSystem* const selector = Selector(policy);
  const TokenSystem* const merger = Merger(policy);
  TESSERA_CHECK(selector != nullptr || merger != nullptr, policy.text);
  CheckView(view);
  if (selector == nullptr) return merger->decide(*policy.merging, view, memory);
  absl::StatusOr<LayerDecision> stay = selector->decide(*policy.tokens, view, memory);
  if (merger == nullptr || !stay.ok()) return stay;
  KeptEntries staying(view, *stay);
  absl::StatusOr<LayerDecision> merged = merger->decide(*policy.merging, staying.view(), memory);
  if (!merged.ok()) return merged;
  return staying.ToAllEntries(*std::move(merged));
}

absl::StatusOr<LayerDecision> Advance(const Policy& policy, const LayerView& view,
                                      std::span<const std::uint64_t> held, LayerMemory& memory) {
  const TokenSystem* const selector = Selector(policy);
  TESSERA_CHECK(selector != nullptr && selector->advance != nullptr, policy.text);
  CheckView(view);
  TESSERA_CHECK(held.size() == view.lanes.size(), "`held` does not have one count per lane");
  return selector->advance(*policy.tokens, view, held, memory);
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
    add("each query head's queries of largest norm, ", needs.norm_share, " of them");
  }
  if (needs.attention_sums) add("the attention that each key receives from a prompt's queries");
  if (needs.token_ids) add("token ids");
  if (needs.decode_queries) add("the queries of decoded tokens");
  if (needs.layers_alike > 1) add("only of the first of every ", needs.layers_alike, " layers");
  return text.empty() ? "nothing" : text;
}

}  // namespace tessera::policies
