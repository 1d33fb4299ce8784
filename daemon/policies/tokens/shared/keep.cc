#include "daemon/policies/tokens/shared/keep.h"

#include <algorithm>
#include <numeric>

#include "daemon/base/check.h"
#include "kernels/tokens/top.h"

namespace tessera::policies {

std::vector<std::uint32_t> Indices(std::uint64_t begin, std::uint64_t end) {
  std::vector<std::uint32_t> indices(end - begin);
  std::iota(indices.begin(), indices.end(), static_cast<std::uint32_t>(begin));
  return indices;
}

bool KeepsEverything(const LayerView& view, std::uint64_t entries) {
  return std::ranges::all_of(view.lanes,
                             [entries](const LaneEntries& lane) { return lane.count <= entries; });
}

LaneDecision KeepAll(const LaneEntries& lane) { return {.kept = Indices(0, lane.count)}; }

LayerDecision KeepAll(const LayerView& view) {
  LayerDecision decision;
  for (const LaneEntries& lane : view.lanes) decision.push_back(KeepAll(lane));
  return decision;
}

LayerDecision KeepInEveryLane(const LayerView& view, const std::vector<std::uint32_t>& kept) {
  return LayerDecision(view.lanes.size(), LaneDecision{.kept = kept});
}

LaneDecision KeepBetween(const LaneEntries& lane, std::uint64_t sink, std::uint64_t recent,
                         std::uint64_t between, std::span<const double> scores) {
  TESSERA_CHECK(lane.count >= sink + recent && scores.size() == lane.count - sink - recent,
                "the scores do not match the entries");
  LaneDecision decision = {.kept = Indices(0, sink)};
  for (const std::uint32_t i : kernels::TopIndices(scores, between)) {
    decision.kept.push_back(static_cast<std::uint32_t>(sink + i));
  }
  for (std::uint64_t i = lane.count - recent; i < lane.count; ++i) {
    decision.kept.push_back(static_cast<std::uint32_t>(i));
  }
  return decision;
}

}  // namespace tessera::policies
