#include "daemon/policies/token_budget.h"

#include "daemon/base/strings.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {
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

std::uint64_t EntriesOf(const EntryBudget& budget, const LayerView& view, std::uint64_t window) {
  if (budget.tokens != 0) return budget.tokens;
  const std::uint64_t entries = kernels::CountDown(budget.share * static_cast<double>(view.tokens));
  return entries < window ? view.tokens : entries;
}

}  // namespace tessera::policies
