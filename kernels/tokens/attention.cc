#include "kernels/tokens/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace tessera::kernels {

VisibleRanges CausalRanges(std::span<const std::uint64_t> queries,
                           std::span<const std::uint64_t> entries, std::uint32_t sliding_window) {
  // The index of the first entry after `position`.
  const auto index_behind = [entries](std::uint64_t position) {
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

std::string_view ObservationProblem(const KeyObservation& look, std::uint64_t keys) {
  const std::uint64_t count = look.sums.size();
  if (look.first > keys || count > keys - look.first) return "keys end beyond the last key";
  if (look.key.has_value() && *look.key >= keys) return "the query key is beyond the last key";
  if (look.visible.begin.size() != look.query_count() ||
      look.visible.end.size() != look.query_count()) {
    return "the number of visible ranges differs from the number of queries";
  }
  if (!look.log2_weights.empty() && look.log2_weights.size() != count) {
    return "the number of weights differs from the number of observed keys";
  }
  const auto beyond = [count](std::uint64_t end) { return end > count; };
  if (std::ranges::any_of(look.visible.end, beyond)) return "a range ends beyond the keys";
  return {};
}

void AttentionSums::Add(RowRange keys, const KeyObservation& look) {
  const std::uint64_t count = look.sums.size();
  if (count == 0 || look.query_count() == 0) return;
  scratch_.resize(std::max<std::size_t>(scratch_.size(), kObserveRows * count));
  const std::size_t stride = geometry_.head_dim * ElementBytes(geometry_.type);
  operations_.observe(
      {.keys = keys.rows + look.first * stride,
       .key_stride = stride,
       .key_count = count,
       .queries = look.key.has_value() ? keys.rows + *look.key * stride : look.queries.rows,
       .query_stride = stride,
       .query_count = static_cast<std::uint32_t>(look.query_count()),
       .visible_begin = look.visible.begin.data(),
       .visible_end = look.visible.end.data(),
       .log2_weights = look.log2_weights.empty() ? nullptr : look.log2_weights.data(),
       .head_dim = geometry_.head_dim,
       .type = geometry_.type,
       .scale = geometry_.scale,
       .logit_softcap = geometry_.logit_softcap,
       .logits = look.logits,
       .scratch = scratch_.data(),
       .sums = look.sums.data()});
}

std::vector<float> Log2Weights(std::span<const float> weights) {
  std::vector<float> logs(weights.size());
  std::ranges::transform(weights, logs.begin(), [](float weight) { return std::log2(weight); });
  return logs;
}

void AddSharesOfVisible(const KeyProducts& keys, std::span<const std::uint32_t> seen,
                        const LayerGeometry& geometry, double part, std::span<double> sums) {
  const double cap = geometry.logit_softcap;
  const auto logit = [&](std::uint32_t i) {
    const double scaled = geometry.scale * keys.products[i];
    const double capped = cap == 0 ? scaled : cap * std::tanh(scaled / cap);
    return keys.log2_weights.empty() ? capped : capped + std::numbers::ln2 * keys.log2_weights[i];
  };
  double largest = -std::numeric_limits<double>::infinity();
  for (const std::uint32_t i : seen) largest = std::max(largest, logit(i));
  double total = 0;
  for (const std::uint32_t i : seen) total += std::exp(logit(i) - largest);
  for (std::size_t i = 0; i < seen.size(); ++i) {
    sums[i] += part * std::exp(logit(seen[i]) - largest) / total;
  }
}

}  // namespace tessera::kernels
