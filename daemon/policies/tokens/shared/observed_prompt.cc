#include "daemon/policies/tokens/shared/observed_prompt.h"

#include <algorithm>
#include <vector>

#include "absl/status/status.h"

namespace tessera::policies {

absl::Status Missing(std::string_view system, std::string_view what) {
  return absl::FailedPreconditionError(Concat(
      system, ": ", what, " not been observed; the worker must call ", kObserveCall, " first"));
}

absl::StatusOr<ObservedQueries> QueriesOf(std::string_view system, const LayerView& view,
                                          std::uint32_t head) {
  if (head >= view.queries.size() || view.queries[head].positions.empty()) {
    return Missing(system, Concat("queries of head ", head, " have"));
  }
  const HeadQueries& shown = view.queries[head];
  return ObservedQueries{.positions = shown.positions,
                         .rows = {.rows = shown.rows, .count = shown.positions.size()}};
}

absl::StatusOr<ObservedQueries> NewestQueries(std::string_view system, const LayerView& view,
                                              std::uint32_t head, std::uint64_t count) {
  absl::StatusOr<ObservedQueries> all = QueriesOf(system, view, head);
  if (!all.ok()) return all;
  const std::uint64_t first = view.tokens - count;
  const auto index_of = [&](std::uint64_t position) {
    return static_cast<std::uint64_t>(std::ranges::lower_bound(all->positions, position) -
                                      all->positions.begin());
  };
  // Positions are unique, so the count shows whether all are present. Later queries may follow.
  const std::uint64_t begin = index_of(first);
  const std::uint64_t shown = index_of(view.tokens) - begin;
  if (shown != count) {
    return Missing(system, Concat(count - shown, " of the newest ", count, " queries of head ",
                                  head, " have"));
  }
  return all->Part(begin, count, RowBytes(view));
}

absl::StatusOr<ObservedQueries> QueryAt(std::string_view system, const LayerView& view,
                                        std::uint32_t head, std::uint64_t position) {
  absl::StatusOr<ObservedQueries> all = QueriesOf(system, view, head);
  if (!all.ok()) return all;
  const auto found = std::ranges::lower_bound(all->positions, position);
  if (found == all->positions.end() || *found != position) {
    return Missing(system, Concat("queries of head ", head, " at position ", position, " have"));
  }
  return all->Part(static_cast<std::uint64_t>(found - all->positions.begin()), 1, RowBytes(view));
}

std::size_t RowBytes(const LayerView& view) {
  return view.geometry.head_dim * kernels::ElementBytes(view.geometry.type);
}

absl::Status AddShares(const LayerView& view, std::uint32_t kv_head, const ObservedQueries& queries,
                       std::span<double> sums) {
  const kernels::KeyObservation look = {
      .queries = queries.rows,
      .visible = kernels::CausalRanges(queries.positions, view.lanes[kv_head].positions,
                                       view.geometry.sliding_window),
      .log2_weights = kernels::Log2Weights(view.lanes[kv_head].weights),
      .sums = sums};
  return view.scorer->Look(kv_head, std::span(&look, 1));
}

absl::Status AddSharesAt(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                         std::uint64_t position, std::uint32_t newest,
                         std::span<const std::uint32_t> seen, double part, std::span<double> paid) {
  const std::uint64_t count = std::uint64_t{newest} + 1;
  const std::uint32_t group = view.geometry.group();
  std::vector<std::vector<double>> products(group, std::vector<double>(count));
  std::vector<kernels::KeyObservation> looks(group);
  for (std::uint32_t i = 0; i < group; ++i) {
    const auto query = QueryAt(system, view, kv_head * group + i, position);
    if (!query.ok()) return query.status();
    looks[i] = {.queries = query->rows,
                .visible = kernels::FullRanges(1, count),
                .logits = true,
                .sums = products[i]};
  }
  if (absl::Status status = view.scorer->Look(kv_head, looks); !status.ok()) return status;
  const kernels::VisibleRanges visible = kernels::CausalRanges(
      std::span(&position, 1), view.lanes[kv_head].positions, view.geometry.sliding_window);
  const auto first = static_cast<std::size_t>(
      std::ranges::lower_bound(seen, visible.begin.front()) - seen.begin());
  const std::vector<float> weights = kernels::Log2Weights(view.lanes[kv_head].weights);
  for (const std::vector<double>& of_head : products) {
    kernels::AddSharesOfVisible({.products = of_head, .log2_weights = weights}, seen.subspan(first),
                                view.geometry, part, paid.subspan(first));
  }
  return absl::OkStatus();
}

absl::Status AddSharesOfStep(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                             std::uint64_t first, std::uint64_t end,
                             std::span<const std::uint32_t> seen, double part,
                             std::span<double> paid) {
  const LaneEntries& lane = view.lanes[kv_head];
  const std::span<const std::uint64_t> own = lane.positions.subspan(first, end - first);
  kernels::KeyObservation look = {.visible = kernels::CausalRanges(own, lane.positions.first(end),
                                                                   view.geometry.sliding_window),
                                  .log2_weights = kernels::Log2Weights(lane.weights)};
  look.log2_weights.resize(end);
  std::vector<bool> there(first);
  for (const std::uint32_t i : seen) there[i] = true;
  for (std::uint64_t i = 0; i < first; ++i) {
    if (!there[i]) look.log2_weights[i] = kernels::kLog2ZeroWeight;
  }
  std::vector<double> sums(end);
  look.sums = sums;
  for (std::uint32_t i = 0; i < view.geometry.group(); ++i) {
    std::vector<std::byte> rows;
    for (const std::uint64_t position : own) {
      const auto query = QueryAt(system, view, kv_head * view.geometry.group() + i, position);
      if (!query.ok()) return query.status();
      rows.insert(rows.end(), query->rows.rows, query->rows.rows + RowBytes(view));
    }
    look.queries = {.rows = rows.data(), .count = own.size()};
    absl::Status status = view.scorer->Look(kv_head, std::span(&look, 1));
    if (!status.ok()) return status;
  }
  for (std::size_t i = 0; i < seen.size(); ++i) paid[i] += part * sums[seen[i]];
  for (std::uint64_t i = first; i < end; ++i) paid[seen.size() + i - first] += part * sums[i];
  return absl::OkStatus();
}

absl::Status CheckEqualCounts(std::string_view system, const LayerView& view) {
  for (const LaneEntries& lane : view.lanes) {
    if (lane.count == view.lanes.front().count) continue;
    return absl::FailedPreconditionError(
        Concat(system, ": lanes hold ", view.lanes.front().count, " and ", lane.count,
               " entries, but one decision for all lanes needs equal counts"));
  }
  return absl::OkStatus();
}

absl::Status CheckEqualLanes(std::string_view system, const LayerView& view) {
  if (absl::Status status = CheckEqualCounts(system, view); !status.ok()) return status;
  for (const LaneEntries& lane : view.lanes) {
    if (std::ranges::equal(lane.positions, view.lanes.front().positions)) continue;
    return absl::FailedPreconditionError(
        Concat(system,
               ": lanes hold entries of different tokens, but one decision for all lanes needs the "
               "same tokens"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::policies
