// PyramidKV: SnapKV with more entries in the first layers and fewer in the last. As in kvpress, the
// layers' budgets fall in equal steps around the budget, rounded with halves to even. If a layer
// would get less than its window or more entries than exist, all layers get the same.
#include <array>
#include <cmath>

#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_system.h"
#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/token_budget.h"
#include "daemon/policies/tokens/shared/window_scores.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kName = "pyramidkv";

constexpr Option RoundedBudgetOption() {
  Option option = kBudgetOption;
  option.help =
      "Share of the tokens since the last compression to keep, averaged over the layers and "
      "including the window; not together with tokens";
  return option;
}

constexpr std::array kOptions = {
    RoundedBudgetOption(),
    kTokensOption,
    Option{.name = "beta",
           .type = OptionType::kNumber,
           .standard = "20",
           .least = 1,
           .most = 1000,
           .help = "Steepness of the pyramid: the last layer keeps budget / beta, and the first "
                   "2 budget - budget / beta"},
    kWindowOption,
    kKernelOption,
    kPoolOption};

std::string Check(const Term& term, std::span<const Term>) {
  return BudgetConflict(term.values, term.values.Count("window"));
}

void Apply(const Values& values, Policy& policy) {
  policy.tokens = PyramidKvPolicy{
      .budget = BudgetOf(values), .beta = values.Number("beta"), .scoring = ScoringOf(values)};
}

std::optional<Values> Read(const Policy& policy) {
  const auto* const pyramid = TokensOf<PyramidKvPolicy>(policy);
  if (pyramid == nullptr) return std::nullopt;
  Values values(kOptions);
  GiveBudget(pyramid->budget, values);
  values.Give("beta", pyramid->beta);
  GiveScoring(pyramid->scoring, values);
  return values;
}

Needs NeedsFrom(const TokenPolicy& tokens) {
  return {.last_queries = std::get<PyramidKvPolicy>(tokens).scoring.window};
}

double MeanOf(const PyramidKvPolicy& pyramid, const LayerView& view) {
  return pyramid.budget.tokens != 0 ? static_cast<double>(pyramid.budget.tokens)
                                    : pyramid.budget.share * static_cast<double>(view.tokens);
}

// Python's round(), which kvpress uses.
std::uint64_t HalvesToEven(double entries) {
  return static_cast<std::uint64_t>(std::rint(entries));
}

// The rule of kvpress, including its rounding: n_l = max - l (max - min) / (layers - 1), with the
// window included, so that the mean over the layers is the budget. Every layer keeps the budget
// itself if some layer would keep less than the window or more than there is.
std::uint64_t EntriesOfLayer(const PyramidKvPolicy& pyramid, const LayerView& view) {
  const double tokens = static_cast<double>(view.tokens);
  const double window = pyramid.scoring.window;
  const double budget = MeanOf(pyramid, view);
  double least = budget / pyramid.beta;
  double most = 2 * budget - least;
  if (most >= tokens - window) {
    most = tokens - window;
    least = 2 * budget - most;
  }
  const bool sloped = tokens >= most && most >= least && least >= window && view.layers > 1;
  const double slope = sloped ? (most - least) / (view.layers - 1) : 0;
  return HalvesToEven(sloped ? most - view.layer * slope : budget);
}

absl::StatusOr<LayerDecision> DecideLayer(const TokenPolicy& tokens, const LayerView& view,
                                          LayerMemory&) {
  const auto& pyramid = std::get<PyramidKvPolicy>(tokens);
  const std::uint64_t window = pyramid.scoring.window;
  if (KeepsEverything(view, window)) return KeepAll(view);
  // If the mean covers the window, every layer does: see EntriesOfLayer.
  const auto mean = EntriesOf(kName, pyramid.budget, view, window, HalvesToEven);
  if (!mean.ok()) return mean.status();
  if (*mean >= view.tokens) return KeepAll(view);
  const std::uint64_t entries = EntriesOfLayer(pyramid, view);
  if (KeepsEverything(view, entries)) return KeepAll(view);
  const auto scores = WindowScores(kName, view, pyramid.scoring);
  if (!scores.ok()) return scores.status();
  LayerDecision decision;
  for (std::size_t lane = 0; lane < view.lanes.size(); ++lane) {
    decision.push_back(KeepWindowAndBest(view.lanes[lane], entries, window, (*scores)[lane]));
  }
  return decision;
}

constexpr TokenSystem kSystem = {
    .is = Is<PyramidKvPolicy>, .needs = NeedsFrom, .decide = DecideLayer};

}  // namespace

constexpr TermKind kPyramidKv = {
    .name = kName,
    .is = "Works like snapkv, but keeps more tokens in the first layers and fewer in the last",
    .sets = "tokens, once at the end of a prompt, separately for each kv head",
    .paper = "PyramidKV (arXiv 2406.02069)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
