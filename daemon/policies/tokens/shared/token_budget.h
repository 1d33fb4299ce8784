// The options `budget` and `tokens` of every system with an EntryBudget.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/policies/option.h"
#include "daemon/policies/registry_rows.h"
#include "daemon/policies/token_options.h"
#include "daemon/policies/token_policy.h"
#include "kernels/tokens/counts.h"

namespace tessera::policies {

inline constexpr std::string_view kBudget = "budget";
inline constexpr std::string_view kTokens = "tokens";

// Upper limit of sinks and newest tokens.
inline constexpr double kMostPinned = 65536;

inline constexpr Option kBudgetOption = {
    .name = kBudget,
    .type = OptionType::kNumber,
    .standard = "0.2",
    .above_least = true,
    .unit = "share",
    .help =
        "Share of the tokens since the last compression to keep, rounded down and including the "
        "window; not together with tokens"};
inline constexpr Option kTokensOption = {
    .name = kTokens,
    .type = OptionType::kCount,
    .least = 1,
    .most = kMostEntries,
    .unit = "tokens",
    .help = "Number of tokens since the last compression to keep; replaces budget"};

// The conflict between both options, or with a window that counts in the budget; empty: none.
std::string BudgetConflict(const Values& values, std::uint64_t window);
EntryBudget BudgetOf(const Values& values);
void GiveBudget(const EntryBudget& budget, Values& values);

// How a share of the tokens becomes a number of entries.
using Rounding = std::uint64_t (*)(double entries);

// The budget as a number of entries. The view must have more tokens than the window.
// INVALID_ARGUMENT: the share is less than the window, which counts in it; the message says which
// share and how many tokens would be enough. `name` is the system's name.
absl::StatusOr<std::uint64_t> EntriesOf(std::string_view name, const EntryBudget& budget,
                                        const LayerView& view, std::uint64_t window,
                                        Rounding rounded = kernels::CountDown);

// Marks a refusal with LeavesWhole: `enough` tokens would not be refused; 0: unknown.
void MarkLeavesWhole(absl::Status& refusal, std::uint64_t enough);

}  // namespace tessera::policies
