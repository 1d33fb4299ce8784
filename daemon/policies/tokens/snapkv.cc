// SnapKV: keeps the tokens that the queries of the newest tokens attend to. Each kv head decides
// separately. The window's mean attention is smoothed per query head, over the tokens before the
// window with zeros beyond both ends, then averaged over the query heads of the kv head.
#include <array>

#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "daemon/policies/tokens/shared/window_scores.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "snapkv";

constexpr std::array kOptions = {kBudgetOption, kTokensOption, kWindowOption, kKernelOption,
                                 kPoolOption};

std::string Check(const Term& term, std::span<const Term>) {
  return BudgetConflict(term.values, term.values.Count("window"));
}

void Apply(const Values& values, Policy& policy) {
  policy.tokens = SnapKvPolicy{.budget = BudgetOf(values), .scoring = ScoringOf(values)};
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const snap = TokensOf<SnapKvPolicy>(policy);
  if (snap == nullptr) return std::nullopt;
  Values values(kOptions);
  GiveBudget(snap->budget, values);
  GiveScoring(snap->scoring, values);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  return {.last_queries = std::get<SnapKvPolicy>(tokens).scoring.window};
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  const auto& snap = std::get<SnapKvPolicy>(tokens);
  const std::uint64_t window = snap.scoring.window;
  if (KeepsEverything(view, window)) return KeepAll(view);
  const auto entries = EntriesOf(kName, snap.budget, view, window);
  if (!entries.ok()) return entries.status();
  if (KeepsEverything(view, *entries)) return KeepAll(view);
  const auto scores = WindowScores(kName, view, snap.scoring);
  if (!scores.ok()) return scores.status();
  LayerDecision decision;
  for (std::size_t lane = 0; lane < view.lanes.size(); ++lane) {
    decision.push_back(KeepWindowAndBest(view.lanes[lane], *entries, window, (*scores)[lane]));
  }
  return decision;
}

constexpr TokenSystem kSystem = {.is = Is<SnapKvPolicy>, .needs = NeedsFrom, .decide = DecideLayer};

}  // namespace

constexpr TermKind kSnapKv = {
    .name = kName,
    .is = "Keeps the newest tokens of a prompt, and those that their queries attend to most",
    .sets = "tokens, once at the end of a prompt, separately for each kv head",
    .paper = "SnapKV (arXiv 2404.14469)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
