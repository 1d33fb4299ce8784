#include "daemon/policies/kept_entries.h"

#include <utility>

#include "daemon/base/check.h"

namespace tessera::policies {
namespace {

std::vector<std::vector<std::uint32_t>> KeptOf(const LayerDecision& decision) {
  std::vector<std::vector<std::uint32_t>> kept;
  for (const LaneDecision& lane : decision) {
    TESSERA_CHECK(!lane.merges(), "the token policy's decision merges entries");
    kept.push_back(lane.kept);
  }
  return kept;
}

}  // namespace

KeptEntries::KeptEntries(const LayerView& view, const LayerDecision& stay)
    : stay_(KeptOf(stay)), scorer_(*view.scorer, stay_), view_(view) {
  for (std::size_t head = 0; head < stay_.size(); ++head) {
    const LaneEntries& all = view.lanes[head];
    std::vector<std::uint64_t>& positions = positions_.emplace_back();
    std::vector<float>& weights = weights_.emplace_back();
    for (const std::uint32_t entry : stay_[head]) {
      positions.push_back(all.positions[entry]);
      if (!all.weights.empty()) weights.push_back(all.weights[entry]);
    }
    lanes_.push_back({.count = positions.size(),
                      .positions = positions,
                      .weights = weights,
                      .before = all.before});
  }
  view_.lanes = lanes_;
  view_.scorer = &scorer_;
  // These refer to all entries, and merging policies do not use them.
  view_.queries = {};
  view_.sums = {};
}

LayerDecision KeptEntries::ToAllEntries(LayerDecision decision) const {
  for (std::size_t head = 0; head < decision.size(); ++head) {
    for (std::uint32_t& entry : decision[head].kept) entry = stay_[head][entry];
    for (std::uint32_t& entry : decision[head].members) entry = stay_[head][entry];
  }
  return decision;
}

absl::Status KeptEntries::Scorer::Look(std::uint32_t kv_head,
                                       std::span<const kernels::KeyObservation> looks) {
  const std::vector<std::uint32_t>& stay = stay_[kv_head];
  std::vector<std::vector<double>> sums(looks.size());
  std::vector<kernels::KeyObservation> wider;
  for (std::size_t i = 0; i < looks.size(); ++i) {
    const kernels::KeyObservation& look = looks[i];
    TESSERA_CHECK(look.key.has_value() && look.logits,
                  "a merging policy scores keys by queries or by shares of attention");
    if (look.sums.empty()) continue;
    const std::uint64_t first = stay[look.first];
    sums[i].resize(stay[look.first + look.sums.size() - 1] + 1 - first);
    wider.push_back({.key = stay[*look.key],
                     .first = first,
                     .visible = kernels::FullRanges(1, sums[i].size()),
                     .logits = true,
                     .sums = sums[i]});
  }
  if (absl::Status status = all_.Look(kv_head, wider); !status.ok()) return status;
  for (std::size_t i = 0; i < looks.size(); ++i) {
    const kernels::KeyObservation& look = looks[i];
    for (std::uint64_t t = look.visible.begin.front(); t < look.visible.end.front(); ++t) {
      look.sums[t] += sums[i][stay[look.first + t] - stay[look.first]];
    }
  }
  return absl::OkStatus();
}

absl::Status KeptEntries::Scorer::AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) {
  if (sums.empty()) return absl::OkStatus();
  const std::vector<std::uint32_t>& stay = stay_[kv_head];
  std::vector<double> all(stay[sums.size() - 1] + 1);
  if (absl::Status status = all_.AddSquaredLengths(kv_head, all); !status.ok()) return status;
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += all[stay[i]];
  return absl::OkStatus();
}

absl::Status KeptEntries::Scorer::AddChannelSquares(std::uint32_t, std::uint64_t,
                                                    std::span<double>) {
  TESSERA_CHECK(false, "key channels are scored by all entries, not by the kept ones");
  __builtin_unreachable();
}

}  // namespace tessera::policies
