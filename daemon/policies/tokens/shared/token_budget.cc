#include "daemon/policies/tokens/shared/token_budget.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ranges>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "daemon/base/strings.h"
#include "daemon/policies/least_tokens.h"

namespace tessera::policies {
namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};
constexpr char kLeavesWhole[] = "tessera/leaves-whole";

// The fewest tokens of which this share is at least the window. Rounding changes the number of
// entries by less than 1.
std::uint64_t FewestTokens(double share, std::uint64_t window, Rounding rounded) {
  constexpr double kLargest = 0x1p52;  // doubles are exact integers up to here
  const double most = static_cast<double>(window + 1) / share;
  if (!(most < kLargest)) return kNever;
  const auto tokens = std::views::iota(std::uint64_t{1}, static_cast<std::uint64_t>(most) + 2);
  return *std::ranges::partition_point(tokens, [&](std::uint64_t count) {
    return rounded(share * static_cast<double>(count)) < window;
  });
}

// The least share of these tokens that is at least the window, rounded up to four digits. There
// must be more tokens than the window.
double LeastShare(std::uint64_t tokens, std::uint64_t window, Rounding rounded) {
  const double exact = static_cast<double>(window) / static_cast<double>(tokens);
  const double steps = std::pow(10.0, 3 - std::floor(std::log10(exact)));
  const auto shares = std::views::iota(1u, 10001u);
  const std::uint32_t least = *std::ranges::partition_point(shares, [&](std::uint32_t share) {
    return rounded(share / steps * static_cast<double>(tokens)) < window;
  });
  return least / steps;
}

}  // namespace

std::string BudgetConflict(const Values& values, std::uint64_t window) {
  if (!values.given(kTokens)) return "";
  if (values.given(kBudget)) return "budget and tokens are both given; give only one of them";
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

absl::StatusOr<std::uint64_t> EntriesOf(std::string_view name, const EntryBudget& budget,
                                        const LayerView& view, std::uint64_t window,
                                        Rounding rounded) {
  if (budget.tokens != 0) return budget.tokens;
  const std::uint64_t entries = rounded(budget.share * static_cast<double>(view.tokens));
  if (entries >= window) return entries;
  const std::uint64_t tokens = FewestTokens(budget.share, window, rounded);
  absl::Status refusal = absl::InvalidArgumentError(
      Concat(name, ": budget ", budget.share, " of ", view.tokens, " tokens is ", entries,
             " entries, less than window ", window, ", which counts in it; a budget of ",
             LeastShare(view.tokens, window, rounded), " is enough for these tokens",
             tokens == kNever ? ""
                              : Concat(", and a budget of ", budget.share, " is enough for ",
                                       tokens, " tokens or more")));
  MarkLeavesWhole(refusal, tokens == kNever ? 0 : tokens);
  return refusal;
}

void MarkLeavesWhole(absl::Status& refusal, std::uint64_t enough) {
  refusal.SetPayload(kLeavesWhole, absl::Cord(Concat(enough)));
}

bool LeavesWhole(const absl::Status& refusal) {
  return refusal.GetPayload(kLeavesWhole).has_value();
}

std::uint64_t TokensEnoughFor(const absl::Status& refusal) {
  const auto payload = refusal.GetPayload(kLeavesWhole);
  return payload.has_value() ? std::strtoull(std::string(*payload).c_str(), nullptr, 10) : 0;
}

}  // namespace tessera::policies
