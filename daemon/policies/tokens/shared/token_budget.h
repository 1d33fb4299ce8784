// The options `budget` and `tokens`, which every system with an EntryBudget has.
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

// More sinks and newest tokens than anyone keeps.
inline constexpr double kMostPinned = 65536;

inline constexpr Option kBudgetOption = {
    .name = kBudget,
    .type = OptionType::kNumber,
    .standard = "0.2",
    .above_least = true,
    .unit = "share",
    .help =
        "Of the tokens since the last compression so many stay, rounded down; refused where that "
        "is less than the window and there are more tokens than that; not beside tokens"};
inline constexpr Option kTokensOption = {
    .name = kTokens,
    .type = OptionType::kCount,
    .least = 1,
    .most = kMostEntries,
    .unit = "tokens",
    .help = "Of the tokens since the last compression so many stay; instead of budget"};

// What is wrong with them beside each other and a window that counts in the budget; empty: nothing.
std::string BudgetConflict(const Values& values, std::uint64_t window);
EntryBudget BudgetOf(const Values& values);
void GiveBudget(const EntryBudget& budget, Values& values);

// How a share of the tokens becomes a number of entries.
using Rounding = std::uint64_t (*)(double entries);

// What it comes to for this sequence, of which more than the window waits. INVALID_ARGUMENT where a
// share is less than the window, which counts in it; it says which share would do, and how many
// tokens. `name`: of the system.
absl::StatusOr<std::uint64_t> EntriesOf(std::string_view name, const EntryBudget& budget,
                                        const LayerView& view, std::uint64_t window,
                                        Rounding rounded = kernels::CountDown);

// Makes a refusal an answer (LeavesWhole): it would not be one of `enough` tokens; 0: unknown.
void MarkLeavesWhole(absl::Status& refusal, std::uint64_t enough);

}  // namespace tessera::policies
