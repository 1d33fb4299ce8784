// SnapKV's scores: the attention that the queries of the newest tokens pay to all earlier tokens.
// Defines the options `window`, `kernel` and `pool`.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/option.h"
#include "daemon/policies/token_options.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// Limits the queries that are held until the prompt ends.
inline constexpr double kMostWindow = 4096;

inline constexpr double kKernels[] = {1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr std::string_view kPoolWords[] = {"avg", "max"};

inline constexpr Option kWindowOption = {
    .name = "window",
    .type = OptionType::kCount,
    .standard = "32",
    .least = 1,
    .most = kMostWindow,
    .unit = "tokens",
    .help = "Number of newest tokens, which are kept and whose queries score the others"};
inline constexpr Option kKernelOption = {
    .name = "kernel",
    .type = OptionType::kCount,
    .standard = "5",
    .possible = kKernels,
    .unit = "tokens",
    .help = "Number of adjacent scores that smoothing combines, including the token's own"};
inline constexpr Option kPoolOption = {
    .name = "pool",
    .type = OptionType::kWord,
    .standard = "avg",
    .words = kPoolWords,
    .help = "Whether smoothing takes the average or the maximum"};

WindowScoring ScoringOf(const Values& values);
void GiveScoring(const WindowScoring& scoring, Values& values);

// By kv head, for each entry before the window: the mean attention of the window's queries,
// smoothed, then averaged over the query heads of the group. Empty for a lane that is not longer
// than the window.
absl::StatusOr<std::vector<std::vector<double>>> WindowScores(std::string_view system,
                                                              const LayerView& view,
                                                              const WindowScoring& scoring);

// Keeps `entries` of the lane: the window, and the entries before it with the highest scores.
LaneDecision KeepWindowAndBest(const LaneEntries& lane, std::uint64_t entries, std::uint64_t window,
                               const std::vector<double>& scores);

}  // namespace tessera::policies
