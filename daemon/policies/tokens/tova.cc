// TOVA: at every step, drops the entry that the newest query attends to least, averaged over all
// heads. All lanes of a layer keep the same entries. The newest token itself may be dropped.
#include <algorithm>

#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "kernels/tokens/top.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "tova";

constexpr Option kOptions[] = {
    {.name = kBudget,
     .type = OptionType::kCount,
     .standard = "512",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of tokens to keep"},
};

void Apply(const Values& values, Policy& policy) {
  policy.tokens = TovaPolicy{.budget = values.Count(kBudget)};
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const tova = TokensOf<TovaPolicy>(policy);
  if (tova == nullptr) return std::nullopt;
  Values values(kOptions);
  values.Give(kBudget, static_cast<double>(tova->budget));
  return values;
}

Needs NeedsFrom(const TokenPolicy&) { return {.last_queries = 1, .decode_queries = true}; }

// After a forward step whose last token is entry `newest`: reduces `held` to the budget.
absl::Status Step(const TovaPolicy& tova, const LayerView& view, std::uint32_t newest,
                  std::uint64_t position, std::vector<std::uint32_t>& held) {
  if (held.size() <= tova.budget) return absl::OkStatus();
  std::vector<double> paid(held.size());
  for (std::uint32_t lane = 0; lane < view.lanes.size(); ++lane) {
    absl::Status status = AddSharesAt(kName, view, lane, position, newest, held,
                                      1.0 / view.geometry.query_heads, paid);
    if (!status.ok()) return status;
  }
  std::vector<std::uint32_t> kept;
  for (const std::uint32_t i : kernels::TopIndices(paid, tova.budget)) kept.push_back(held[i]);
  held = std::move(kept);
  return absl::OkStatus();
}

// Replays the entries from `held` on, one forward step after another.
absl::StatusOr<LayerDecision> GoOn(const TokenPolicy& tokens, const LayerView& view,
                                   std::uint64_t held) {
  const auto& tova = std::get<TovaPolicy>(tokens);
  if (KeepsEverything(view, tova.budget)) return KeepAll(view);
  if (absl::Status status = CheckEqualLanes(kName, view); !status.ok()) return status;
  const LaneEntries& lane = view.lanes.front();
  std::vector<std::uint32_t> kept = Indices(0, held);
  for (std::uint64_t i = held; i < lane.count;) {
    const std::uint64_t end = view.StepEnd(lane.positions[i]);
    for (; i < lane.count && lane.positions[i] < end; ++i) {
      kept.push_back(static_cast<std::uint32_t>(i));
    }
    absl::Status status = Step(tova, view, kept.back(), lane.positions[i - 1], kept);
    if (!status.ok()) return status;
  }
  return KeepInEveryLane(view, kept);
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  return GoOn(tokens, view, 0);
}

absl::StatusOr<LayerDecision> AdvanceLayer(const TokenPolicy& tokens, const LayerView& view,
                                           std::span<const std::uint64_t> held, LayerMemory&) {
  return GoOn(tokens, view, held.front());
}

LaneEquality WantsAlike(const TokenPolicy&) { return LaneEquality::kTokens; }

constexpr TokenSystem kSystem = {.is = Is<TovaPolicy>,
                                 .needs = NeedsFrom,
                                 .decide = DecideLayer,
                                 .advance = AdvanceLayer,
                                 .lane_equality = WantsAlike};

}  // namespace

constexpr TermKind kTova = {
    .name = kName,
    .is = "Keeps, at every step, the tokens that the newest query attends to most",
    .sets = "tokens, also while decoding, the same for all kv heads of a layer",
    .paper = "TOVA (arXiv 2401.06104)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
