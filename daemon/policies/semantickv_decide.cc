#include <algorithm>

#include "daemon/policies/keep.h"
#include "daemon/policies/semantickv.h"
#include "daemon/policies/shown.h"
#include "kernels/tokens/counts.h"
#include "kernels/tokens/rows.h"
#include "kernels/tokens/top.h"

namespace tessera::policies {
namespace {

using kernels::CountDown;
using kernels::CountUp;
using Aggregate = SemanticKvPolicy::Aggregate;
using Scores = std::vector<double>;

// What the shares come to for this sequence.
struct Counts {
  std::uint64_t semantic;  // queries of the largest norm
  std::uint64_t recent;
  std::uint64_t middle;  // entries that stay between

  Counts(const SemanticKvPolicy& options, std::uint64_t token_count) {
    const double tokens = static_cast<double>(token_count);
    semantic = CountUp(options.lambda * tokens);
    recent = std::max<std::uint64_t>(1, CountUp(options.recent_ratio * tokens));
    const std::uint64_t ends = options.sink + recent;
    const auto beyond_ends = [ends](std::uint64_t count) { return count - std::min(count, ends); };
    middle = options.keep_middle.has_value()
                 ? CountDown(*options.keep_middle * static_cast<double>(beyond_ends(token_count)))
                 : beyond_ends(CountDown(options.keep_total * tokens));
  }
  std::uint64_t kept(const SemanticKvPolicy& options) const {
    return options.sink + recent + middle;
  }
};

// The queries that judge for one head, gathered.
struct Observers {
  std::vector<std::uint64_t> positions;
  std::vector<std::byte> rows;

  kernels::RowRange span() const { return {.rows = rows.data(), .count = positions.size()}; }
};

// Those of the newest tokens, and of the others as many of the largest norm as make up the share:
// a query that is both counts once. Of what was shown; more may have been.
absl::StatusOr<Observers> ObserversOf(const LayerView& view, std::uint32_t head,
                                      const Counts& counts) {
  const auto newest = NewestQueries(kSemanticKvName, view, head, counts.recent);
  if (!newest.ok()) return newest.status();
  const auto all = QueriesOf(kSemanticKvName, view, head);
  if (all->positions.size() < counts.semantic) {
    return Missing(kSemanticKvName,
                   Concat(counts.semantic - all->positions.size(), " of the ", counts.semantic,
                          " queries of largest norm of head ", head, " have"));
  }
  const std::size_t row_bytes = RowBytes(view);
  Scores lengths;
  for (std::uint64_t i = 0; i < all->rows.count; ++i) {
    lengths.push_back(kernels::SquaredLength(all->rows.rows + i * row_bytes, view.geometry.head_dim,
                                             view.geometry.type));
  }
  const std::vector<std::uint32_t> longest = kernels::TopIndices(lengths, counts.semantic);
  Observers observers;
  for (std::uint32_t i = 0; i < all->rows.count; ++i) {
    const bool recent = all->positions[i] + counts.recent >= view.tokens;
    if (!recent && !std::ranges::binary_search(longest, i)) continue;
    observers.positions.push_back(all->positions[i]);
    const std::byte* const row = all->rows.rows + i * row_bytes;
    observers.rows.insert(observers.rows.end(), row, row + row_bytes);
  }
  return observers;
}

// For each entry of the lane what one head's observers pay to it on average.
absl::StatusOr<Scores> HeadScores(const SemanticKvPolicy& semantic, const LayerView& view,
                                  std::uint32_t head, const Counts& counts) {
  const std::uint32_t kv_head = head / view.geometry.group();
  const LaneEntries& lane = view.lanes[kv_head];
  const auto observers = ObserversOf(view, head, counts);
  if (!observers.ok()) return observers.status();
  const std::vector<std::uint64_t>& positions = observers->positions;
  Scores paid(lane.count);
  kernels::KeyLook look = {.queries = observers->span(), .sums = paid};
  look.visible = semantic.causal ? kernels::CausalRanges(positions, lane.positions,
                                                         view.geometry.sliding_window)
                                 : kernels::FullRanges(positions.size(), lane.count);
  absl::Status status = view.scorer->Look(kv_head, std::span(&look, 1));
  if (!status.ok()) return status;
  for (std::uint64_t i = 0; i < lane.count; ++i) {
    // Those at or after the entry.
    const auto after = positions.end() - std::ranges::lower_bound(positions, lane.positions[i]);
    const auto by = semantic.norm_visible ? after : std::ssize(positions);
    if (by != 0) paid[i] /= static_cast<double>(by);
  }
  return paid;
}

void Join(Aggregate aggregate, std::uint32_t group, const Scores& of_head, Scores& scores) {
  if (scores.empty()) {
    scores = of_head;
    if (aggregate == Aggregate::kMean) {
      for (double& score : scores) score /= group;
    }
    return;
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (aggregate == Aggregate::kMax) {
      scores[i] = std::max(scores[i], of_head[i]);
    } else {
      scores[i] += aggregate == Aggregate::kMean ? of_head[i] / group : of_head[i];
    }
  }
}

}  // namespace

absl::StatusOr<LayerDecision> DecideSemantic(const SemanticKvPolicy& semantic,
                                             const LayerView& view) {
  const Counts counts(semantic, view.tokens);
  const std::uint32_t group = view.geometry.group();
  LayerDecision decision;
  for (std::uint32_t kv_head = 0; kv_head < view.lanes.size(); ++kv_head) {
    const LaneEntries& lane = view.lanes[kv_head];
    if (lane.count <= counts.kept(semantic)) {
      decision.push_back(KeepAll(lane));
      continue;
    }
    Scores scores;
    for (std::uint32_t i = 0; i < group; ++i) {
      const auto of_head = HeadScores(semantic, view, kv_head * group + i, counts);
      if (!of_head.ok()) return of_head.status();
      Join(semantic.aggregate, group, *of_head, scores);
    }
    const auto between = std::span<const double>(scores).subspan(
        semantic.sink, lane.count - semantic.sink - counts.recent);
    decision.push_back(KeepBetween(lane, semantic.sink, counts.recent, counts.middle, between));
  }
  return decision;
}

}  // namespace tessera::policies
