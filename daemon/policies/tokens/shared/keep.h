// Helpers that build decisions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/policies/token_policy.h"

namespace tessera::policies {

// begin, begin + 1, ..., end - 1
std::vector<std::uint32_t> Indices(std::uint64_t begin, std::uint64_t end);

// Whether no lane has more than `entries`.
bool KeepsEverything(const LayerView& view, std::uint64_t entries);

LaneDecision KeepAll(const LaneEntries& lane);
LayerDecision KeepAll(const LayerView& view);
LayerDecision KeepInEveryLane(const LayerView& view, const std::vector<std::uint32_t>& kept);

// Keeps the first `sink` entries, the last `recent`, and the `between` entries in the middle with
// the highest scores. `scores` has one for each middle entry. The lane has at least sink + recent
// entries.
LaneDecision KeepBetween(const LaneEntries& lane, std::uint64_t sink, std::uint64_t recent,
                         std::uint64_t between, std::span<const double> scores);

}  // namespace tessera::policies
