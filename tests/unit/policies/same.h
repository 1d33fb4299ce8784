// Equality of policies, field by field except for their texts, so that tests can check texts. A
// field added to these structs does not compile here until it is compared. Token policies compare
// themselves.
#pragma once

#include <optional>
#include <tuple>

#include "daemon/policies/policy.h"

namespace tessera::policies {

inline auto FieldsOf(const kernels::Loss& loss) { return std::tie(loss.key, loss.value); }

inline auto FieldsOf(const MosaicPolicy& mosaic) {
  const auto& [strategy, segments, pressed] = mosaic;
  const auto& [kept, groups, threshold, truncated, reorder, summary, blocks, block_variance, values,
               rotation_type, sampled_rows, trial_rows, reorder_rows] = strategy;
  const auto& [tokens, min_tokens, sinks, recent, loss_window, margin] = segments;
  return std::tuple_cat(std::tie(kept, groups, truncated, reorder, summary, blocks, block_variance,
                                 values, rotation_type, sampled_rows, trial_rows, reorder_rows,
                                 tokens, min_tokens, sinks, recent, loss_window, pressed),
                        FieldsOf(threshold), FieldsOf(margin));
}

inline auto FieldsOf(const KeyChannelPolicy& channels) {
  const auto& [ratio, recent, window, values] = channels;
  return std::tie(ratio, recent, window, values);
}

inline auto FieldsOf(const SummaryPolicy& summaries) {
  const auto& [summary, block] = summaries;
  return std::tie(summary, block);
}

inline auto FieldsOf(const PlanesPolicy& planes) {
  const auto& [key, value, sinks, recent, book_rows, book, crumbs] = planes;
  return std::tie(key, value, sinks, recent, book_rows, book, crumbs);
}

inline auto FieldsOf(const SelectionPolicy& selection) {
  const auto& [rule, dense_layers] = selection;
  const auto& [rate, entries, floor, judge, first_block, counts_tail, each_head, each_query] = rule;
  return std::tie(dense_layers, rate, entries, floor, judge, first_block, counts_tail, each_head,
                  each_query);
}

template <typename T>
bool SameParts(const std::optional<T>& a, const std::optional<T>& b) {
  if (!a.has_value() || !b.has_value()) return a.has_value() == b.has_value();
  return FieldsOf(*a) == FieldsOf(*b);
}

inline bool Same(const Policy& a, const Policy& b) {
  const auto& [a_text, a_tokens, a_merging, a_mosaic, a_planes, a_channels, a_summaries, a_signs,
               a_selection] = a;
  const auto& [b_text, b_tokens, b_merging, b_mosaic, b_planes, b_channels, b_summaries, b_signs,
               b_selection] = b;
  return a_tokens == b_tokens && a_merging == b_merging && SameParts(a_mosaic, b_mosaic) &&
         SameParts(a_planes, b_planes) && SameParts(a_channels, b_channels) &&
         SameParts(a_summaries, b_summaries) && a_signs == b_signs &&
         SameParts(a_selection, b_selection);
}

}  // namespace tessera::policies
