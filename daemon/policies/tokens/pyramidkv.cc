// PyramidKV: SnapKV with more entries in the first layers and fewer in the last.
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
      "Of the tokens since the last compression so many stay on average over the layers, rounded "
      "(halves to even); refused where that is less than the window and there are more tokens than "
      "that; not beside tokens";
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
           .help =
               "How steep the pyramid is: the last layer has 1 / beta of the budget, the first as "
               "much more"},
    kWindowOption,
    kKernelOption,
    kPoolOption};

std::string Check(const Term& term, std::span<const Term>) {
  return WhyNoBudget(term.values, term.values.Count("window"));
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

// kvpress's round().
std::uint64_t HalvesToEven(double entries) {
  return static_cast<std::uint64_t>(std::rint(entries));
}

// kvpress's rule, with its round(): n_l = max - l (max - min) / (layers - 1),
// the window included, so that the mean over layers is the budget; every layer the budget itself
// where that would give some layer less than its window or more than there is.
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
  if (NothingGoes(view, window)) return KeepAll(view);
  // Every layer has its window as soon as the mean has: where the pyramid would give some layer
  // less, all have the mean.
  const auto mean = EntriesOf(kName, pyramid.budget, view, window, HalvesToEven);
  if (!mean.ok()) return mean.status();
  if (*mean >= view.tokens) return KeepAll(view);
  const std::uint64_t entries = EntriesOfLayer(pyramid, view);
  if (NothingGoes(view, entries)) return KeepAll(view);
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
    .is = "Like snapkv, with more tokens in the first layers and fewer in the last",
    .sets = "tokens, once at the end of a prompt, each kv head its own",
    .paper = "PyramidKV (arXiv 2406.02069)",
    .decides = Decides::kTokens,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
    .tokens = &kSystem,
};

}  // namespace tessera::policies
