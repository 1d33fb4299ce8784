// The options `budget` and `tokens`, which every system with an EntryBudget has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/policies/option.h"
#include "daemon/policies/rows.h"
#include "daemon/policies/token_options.h"
#include "daemon/policies/token_policy.h"

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
    .help = "Of the sequence's tokens so many stay, rounded down; not beside tokens"};
inline constexpr Option kTokensOption = {
    .name = kTokens,
    .type = OptionType::kCount,
    .least = 1,
    .most = kMostEntries,
    .unit = "tokens",
    .help = "So many tokens stay, whatever the length; instead of budget"};

// What is wrong with them beside each other and a window that counts in the budget; empty: nothing.
std::string WhyNoBudget(const Values& values, std::uint64_t window);
EntryBudget BudgetOf(const Values& values);
void GiveBudget(const EntryBudget& budget, Values& values);

// What it comes to for this sequence. INVALID_ARGUMENT where the window alone is more, and some
// lane has more than both.
absl::StatusOr<std::uint64_t> EntriesOf(const EntryBudget& budget, std::string_view system,
                                        const LayerView& view, std::uint64_t window);

}  // namespace tessera::policies
