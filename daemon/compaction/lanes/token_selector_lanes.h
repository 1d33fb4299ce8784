// What a TokenSelector sees of a layer, and what it shows to the policy. Included by
// token_selector.cc only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/compaction/lanes/layer_keys.h"
#include "daemon/compaction/lanes/token_selector.h"
#include "daemon/compaction/observation/lane_entries.h"

namespace tessera::compaction {

inline std::uint64_t CountBefore(std::span<const std::uint64_t> positions, std::uint64_t position) {
  return static_cast<std::uint64_t>(std::lower_bound(positions.begin(), positions.end(), position) -
                                    positions.begin());
}

// The first token whose query norms are compared, if tokens from `begin` on are covered. Tokens
// that were decoded before a prompt do not count: their queries say little about the prompt, and
// they may be settled at any time.
inline std::uint64_t FirstOfPrompts(std::span<const policies::TokenSpan> prompts,
                                    std::uint64_t begin) {
  for (const policies::TokenSpan& prompt : prompts) {
    if (prompt.end > begin) return std::max(prompt.begin, begin);
  }
  return begin;
}

// A snapshot of the lanes of a layer, and what the policy sees of them.
struct TokenSelector::Lanes {
  std::vector<LaneEntryList> seen;
  std::vector<policies::LaneEntries> entries;  // views of `seen`
  std::unique_ptr<LayerKeys> keys;             // null: not needed
  std::vector<std::uint64_t> losses;
  std::vector<bool> channels_gone;  // by lane: earlier rows fix the dropped key channels
  std::uint64_t begin = 0;          // position of the first entry of any lane
  std::uint64_t end = 0;            // all positions are below it
  std::uint64_t tokens = 0;         // number of tokens of the longest lane with entries

  // Hides entries from this position on.
  void CutAt(std::uint64_t position) {
    for (policies::LaneEntries& lane : entries) {
      lane.count = CountBefore(lane.positions, position);
      lane.positions = lane.positions.first(lane.count);
      if (!lane.weights.empty()) lane.weights = lane.weights.first(lane.count);
    }
    end = std::min(end, position);
  }
  std::vector<std::uint64_t> CountsBefore(std::uint64_t position) const {
    std::vector<std::uint64_t> counts;
    for (const policies::LaneEntries& lane : entries) {
      counts.push_back(CountBefore(lane.positions, position));
    }
    return counts;
  }
  std::vector<std::uint64_t> Counts() const { return CountsBefore(end); }
  std::vector<std::uint64_t> FirstPositions() const {
    std::vector<std::uint64_t> first;
    for (const policies::LaneEntries& lane : entries) {
      first.push_back(lane.count == 0 ? 0 : lane.positions.front());
    }
    return first;
  }
};

// The policy's view of the lanes, with the data that it points into.
class TokenSelector::Shown {
 public:
  // Positions, queries and text are relative to `first`; the policy does not see earlier tokens.
  Shown(const Options& options, std::uint32_t layer, const LayerState& state, const Lanes& lanes,
        std::uint64_t first) {
    const cache::Model& model = options.sequence->model();
    for (std::uint32_t head = 0; head < lanes.entries.size(); ++head) {
      const std::span<const std::uint64_t> positions = lanes.entries[head].positions;
      sums_.push_back(state.observation.SumsAt(head, positions));
      sum_spans_.push_back(sums_.back());
      entry_positions_.push_back(Behind(positions, first));
      entries_.push_back(lanes.entries[head]);
      entries_.back().positions = entry_positions_.back();
    }
    for (const policies::TokenSpan& prompt : options.prompts) {
      const std::uint64_t begin = std::max(prompt.begin, first);
      const std::uint64_t end = std::min(prompt.end, lanes.end);
      if (begin < end) prompts_.push_back({.begin = begin - first, .end = end - first});
    }
    const std::uint64_t norms = FirstOfPrompts(options.prompts, first);
    const std::uint64_t row_bytes = RowBytes(model, layer);
    for (const policies::HeadQueries& head : state.observation.queries()) {
      const std::uint64_t skipped = CountBefore(head.positions, first);
      query_positions_.push_back(Behind(head.positions.subspan(skipped), first));
      queries_.push_back(
          {.positions = query_positions_.back(), .rows = head.rows + skipped * row_bytes});
    }
    view_ = {
        .layer = layer,
        .layers = model.layers(),
        .geometry = model.geometry(layer),
        .first = first,
        .tokens = lanes.end - first,
        .prompts = prompts_,
        .lanes = entries_,
        .queries = queries_,
        .norms_first = std::min(norms, lanes.end) - first,
        .norms_observed_end = state.observation.FirstTokenWithoutNorms(norms, lanes.end) - first,
        .norms_known = state.observation.KnownNormQueries(norms, lanes.end),
        .sums = sum_spans_,
        .text = options.text.subspan(std::min<std::size_t>(first, options.text.size())),
        .scorer = lanes.keys.get()};
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

  const policies::LayerView& view() const { return view_; }

 private:
  static std::vector<std::uint64_t> Behind(std::span<const std::uint64_t> positions,
                                           std::uint64_t first) {
    std::vector<std::uint64_t> behind(positions.begin(), positions.end());
    for (std::uint64_t& position : behind) position -= first;
    return behind;
  }
  static std::uint64_t RowBytes(const cache::Model& model, std::uint32_t layer) {
    return model.layout().tile(layer).row_bytes();
  }

  std::vector<std::vector<float>> sums_;
  std::vector<std::span<const float>> sum_spans_;
  std::vector<std::vector<std::uint64_t>> entry_positions_;
  std::vector<policies::LaneEntries> entries_;
  std::vector<policies::TokenSpan> prompts_;
  std::vector<std::vector<std::uint64_t>> query_positions_;
  std::vector<policies::HeadQueries> queries_;
  policies::LayerView view_;
};

}  // namespace tessera::compaction
