#include "kernels/tokens/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::kernels {

VisibleRanges CausalRanges(std::span<const std::uint64_t> queries,
                           std::span<const std::uint64_t> entries, std::uint32_t sliding_window) {
  const auto index_behind = [entries](std::uint64_t position) {  // of the first beyond `position`
    return static_cast<std::uint64_t>(std::ranges::upper_bound(entries, position) -
                                      entries.begin());
  };
  VisibleRanges visible;
  for (const std::uint64_t query : queries) {
    const bool cut = sliding_window != 0 && query >= sliding_window;
    visible.begin.push_back(cut ? index_behind(query - sliding_window) : 0);
    visible.end.push_back(index_behind(query));
  }
  return visible;
}

VisibleRanges FullRanges(std::uint64_t queries, std::uint64_t entries) {
  return {.begin = std::vector<std::uint64_t>(queries),
          .end = std::vector<std::uint64_t>(queries, entries)};
}

void AttentionSums::AddShares(RowRange queries, RowRange keys, const VisibleRanges& visible,
                              std::span<double> sums) {
  Add(/*logits=*/false, queries, keys, visible, sums);
}

void AttentionSums::AddLogits(RowRange queries, RowRange keys, const VisibleRanges& visible,
                              std::span<double> sums) {
  Add(/*logits=*/true, queries, keys, visible, sums);
}

void AttentionSums::Add(bool logits, RowRange queries, RowRange keys, const VisibleRanges& visible,
                        std::span<double> sums) {
  if (keys.count == 0 || queries.count == 0) return;
  scratch_.resize(std::max<std::size_t>(scratch_.size(), kObserveRows * keys.count));
  const std::size_t stride = geometry_.head_dim * ElementBytes(geometry_.type);
  operations_.observe({.keys = keys.rows,
                       .key_stride = stride,
                       .key_count = keys.count,
                       .queries = queries.rows,
                       .query_stride = stride,
                       .query_count = static_cast<std::uint32_t>(queries.count),
                       .visible_begin = visible.begin.data(),
                       .visible_end = visible.end.data(),
                       .head_dim = geometry_.head_dim,
                       .type = geometry_.type,
                       .scale = geometry_.scale,
                       .logit_softcap = geometry_.logit_softcap,
                       .logits = logits,
                       .scratch = scratch_.data(),
                       .sums = sums.data()});
}

void AddSharesAmong(std::span<const double> products, std::span<const std::uint32_t> seen,
                    const LayerGeometry& geometry, double weight, std::span<double> sums) {
  const double cap = geometry.logit_softcap;
  const auto logit = [&](std::uint32_t i) {
    const double scaled = geometry.scale * products[i];
    return cap == 0 ? scaled : cap * std::tanh(scaled / cap);
  };
  double largest = -std::numeric_limits<double>::infinity();
  for (const std::uint32_t i : seen) largest = std::max(largest, logit(i));
  double total = 0;
  for (const std::uint32_t i : seen) total += std::exp(logit(i) - largest);
  for (std::size_t i = 0; i < seen.size(); ++i) {
    sums[i] += weight * std::exp(logit(seen[i]) - largest) / total;
  }
}

}  // namespace tessera::kernels
