// SnapKV's scores: what the queries of the newest tokens pay to all tokens before. The options
// `window`, `kernel` and `pool`.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/option.h"
#include "daemon/policies/token_options.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// Windows are short: their queries are kept until the prompt ends.
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
    .help = "The newest tokens, which stay and whose queries judge the others"};
inline constexpr Option kKernelOption = {
    .name = "kernel",
    .type = OptionType::kCount,
    .standard = "5",
    .possible = kKernels,
    .unit = "tokens",
    .help = "Scores are smoothed over so many neighbours, the token itself included"};
inline constexpr Option kPoolOption = {
    .name = "pool",
    .type = OptionType::kWord,
    .standard = "avg",
    .words = kPoolWords,
    .help = "Whether the neighbours' average or their largest score counts"};

WindowScoring ScoringOf(const Values& values);
void GiveScoring(const WindowScoring& scoring, Values& values);

// By kv head, for each entry before the window: the mean of what the window's queries pay to it,
// smoothed, then the mean over the query heads of the group. Nothing for a lane that is not longer
// than the window.
absl::StatusOr<std::vector<std::vector<double>>> WindowScores(std::string_view system,
                                                              const LayerView& view,
                                                              const WindowScoring& scoring);

// `entries` of the lane: the window, and of those before it the best.
LaneDecision KeepWindowAndBest(const LaneEntries& lane, std::uint64_t entries, std::uint64_t window,
                               const std::vector<double>& scores);

}  // namespace tessera::policies
