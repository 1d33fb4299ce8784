#include "daemon/policies/token_budget.h"

#include <algorithm>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {
namespace {

// Rounded up, so that what the message names is enough.
double EnoughShare(std::uint64_t entries, std::uint64_t tokens) {
  constexpr double kSteps = 10000;
  const double share = static_cast<double>(entries) / static_cast<double>(tokens);
  return static_cast<double>(kernels::CountUp(share * kSteps)) / kSteps;
}

}  // namespace

std::string WhyNoBudget(const Values& values, std::uint64_t window) {
  if (!values.given(kTokens)) return "";
  if (values.given(kBudget))
    return "budget and tokens are both given; each is the budget by itself";
  if (const std::uint64_t tokens = values.Count(kTokens); tokens < window) {
    return Concat("tokens ", tokens, " is less than window ", window, ", which counts in it");
  }
  return "";
}

EntryBudget BudgetOf(const Values& values) {
  if (values.given(kTokens)) return {.tokens = values.Count(kTokens)};
  return {.share = values.Number(kBudget)};
}

void GiveBudget(const EntryBudget& budget, Values& values) {
  if (budget.tokens != 0) {
    values.Give(kTokens, static_cast<double>(budget.tokens));
  } else {
    values.Give(kBudget, budget.share);
  }
}

absl::StatusOr<std::uint64_t> EntriesOf(const EntryBudget& budget, std::string_view system,
                                        const LayerView& view, std::uint64_t window) {
  if (budget.tokens != 0) return budget.tokens;
  const std::uint64_t entries = kernels::CountDown(budget.share * static_cast<double>(view.tokens));
  if (entries >= window) return entries;
  const bool short_lanes = std::ranges::all_of(
      view.lanes, [window](const LaneEntries& lane) { return lane.count <= window; });
  if (short_lanes) return entries;
  return absl::InvalidArgumentError(
      Concat(system, ": budget ", budget.share, " of ", view.tokens, " tokens is ", entries,
             " entries, less than the window of ", window, "; a budget of ",
             EnoughShare(window, view.tokens), " is enough"));
}

}  // namespace tessera::policies
