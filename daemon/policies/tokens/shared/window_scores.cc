#include "daemon/policies/tokens/shared/window_scores.h"

#include "daemon/policies/tokens/shared/keep.h"
#include "daemon/policies/tokens/shared/observed_prompt.h"
#include "kernels/tokens/pool.h"

namespace tessera::policies {
namespace {

// Scores of one query head. Smoothing covers only the entries before the window.
absl::StatusOr<std::vector<double>> HeadScores(std::string_view system, const LayerView& view,
                                               const WindowScoring& scoring, std::uint32_t head) {
  const std::uint32_t kv_head = head / view.geometry.group();
  const LaneEntries& lane = view.lanes[kv_head];
  const absl::StatusOr<ObservedQueries> queries = NewestQueries(system, view, head, scoring.window);
  if (!queries.ok()) return queries.status();
  std::vector<double> sums(lane.count);
  if (absl::Status status = AddShares(view, kv_head, *queries, sums); !status.ok()) return status;
  sums.resize(lane.count - scoring.window);
  for (double& sum : sums) sum /= scoring.window;
  return scoring.pooling == Pooling::kLargest ? kernels::LargestPool(sums, scoring.kernel)
                                              : kernels::AveragePool(sums, scoring.kernel);
}

}  // namespace

WindowScoring ScoringOf(const Values& values) {
  return {.window = values.Count32("window"),
          .kernel = values.Count32("kernel"),
          .pooling = values.Word("pool") == kPoolWords[1] ? Pooling::kLargest : Pooling::kAverage};
}

void GiveScoring(const WindowScoring& scoring, Values& values) {
  values.Give("window", scoring.window);
  values.Give("kernel", scoring.kernel);
  values.Give("pool", kPoolWords[scoring.pooling == Pooling::kLargest ? 1 : 0]);
}

absl::StatusOr<std::vector<std::vector<double>>> WindowScores(std::string_view system,
                                                              const LayerView& view,
                                                              const WindowScoring& scoring) {
  std::vector<std::vector<double>> scores(view.lanes.size());
  for (std::uint32_t head = 0; head < view.geometry.query_heads; ++head) {
    const std::uint32_t kv_head = head / view.geometry.group();
    const LaneEntries& lane = view.lanes[kv_head];
    if (lane.count <= scoring.window) continue;
    const absl::StatusOr<std::vector<double>> of_head = HeadScores(system, view, scoring, head);
    if (!of_head.ok()) return of_head.status();
    scores[kv_head].resize(of_head->size());
    for (std::size_t i = 0; i < of_head->size(); ++i) {
      scores[kv_head][i] += (*of_head)[i] / view.geometry.group();
    }
  }
  return scores;
}

LaneDecision KeepWindowAndBest(const LaneEntries& lane, std::uint64_t entries, std::uint64_t window,
                               const std::vector<double>& scores) {
  if (lane.count <= window || lane.count <= entries) return KeepAll(lane);
  return KeepBetween(lane, /*sink=*/0, window, entries - window, scores);
}

}  // namespace tessera::policies
