#include "daemon/compaction/lanes/layer_choice.h"

#include <algorithm>
#include <utility>

#include "daemon/policies/least_tokens.h"
#include "daemon/policies/policy.h"
#include "kernels/format/dense_tile.h"

namespace tessera::compaction {

bool ChoosesFromAll(const policies::Policy& policy) {
  const bool packs =
      policy.mosaic.has_value() || policy.key_channels.has_value() || policy.uses_books();
  const bool merges_alone = policies::Merges(policy) && !policy.tokens.has_value();
  return policies::Continues(policy) || (merges_alone && !packs);
}

bool LeavesRows(const policies::Policy& policy) {
  return !policy.mosaic.has_value() && !policy.key_channels.has_value() &&
         !policy.summaries.has_value() && !policy.uses_books();
}

bool HasStops(const policies::Policy& policy) {
  return policies::Continues(policy) && (policy.mosaic.has_value() || policy.uses_books());
}

std::uint64_t StopAfter(std::span<const policies::TokenSpan> prompts, std::uint64_t decided) {
  constexpr std::uint64_t kTile = kernels::kTileEntries;
  std::uint64_t first = 0;  // of the tokens that were decoded after the last of these prompts
  for (const policies::TokenSpan& prompt : prompts) {
    if (prompt.begin > decided) {
      return std::min(first + ((decided - first) / kTile + 1) * kTile, prompt.begin);
    }
    if (prompt.end > decided) return prompt.end;
    first = prompt.end;
  }
  return first + ((decided - first) / kTile + 1) * kTile;
}

bool ChoosesByPrompt(const policies::Policy& policy) {
  return policy.uses_books() && policy.chooses() && !policies::Continues(policy);
}

void LayerChoice::CutTo(std::uint64_t tokens) {
  cut_at = std::min(cut_at, tokens);
  end = std::min(end, tokens);
  until = std::min(until, tokens);
  memory.CutTo(tokens, until);
}

bool LayerChoice::Untouched(std::uint32_t kv_head) const {
  const policies::LaneDecision& lane = lanes[kv_head];
  return !lane.merges() && lane.kept.size() == decided[kv_head];
}

bool LayerChoice::UntouchedAll() const {
  for (std::uint32_t head = 0; head < lanes.size(); ++head) {
    if (!Untouched(head)) return false;
  }
  return true;
}

std::vector<policies::ChunkEnds> LayerChoice::BoundariesNow(
    const policies::LayerMemory& before) const {
  std::vector<policies::ChunkEnds> now = memory.boundaries;
  for (std::size_t head = 0; head < now.size(); ++head) {
    if (done[head]) continue;
    now[head] = head < before.boundaries.size() ? before.boundaries[head] : policies::ChunkEnds();
  }
  return now;
}

void LayerChoice::KeepFirst(std::uint32_t kv_head, std::uint64_t count) {
  policies::LaneDecision& lane = lanes[kv_head];
  policies::LaneDecision first;
  for (std::size_t i = 0; i < lane.kept.size() && lane.kept[i] < count; ++i) {
    first.kept.push_back(lane.kept[i]);
    if (!lane.merges()) continue;
    if (first.begins.empty()) first.begins.push_back(0);
    for (std::uint32_t m = lane.begins[i]; m < lane.begins[i + 1]; ++m) {
      if (lane.members[m] < count) first.members.push_back(lane.members[m]);
    }
    first.begins.push_back(static_cast<std::uint32_t>(first.members.size()));
  }
  lane = std::move(first);
}

std::optional<DenseRows> LayerChoice::LeftDense(const policies::Policy& policy) const {
  if (idle || keeps || aligns) return std::nullopt;
  const std::uint64_t most = *std::ranges::max_element(decided);
  DenseRows left = {.first_position = *std::ranges::min_element(first_positions), .tokens = most};
  if (!refused.ok()) {
    left.reason = DenseReason::kTooShort;
    left.needs = policies::TokensEnoughFor(refused);
    return left;
  }
  if (!UntouchedAll() || (!waits && !policy.drops_entries())) return DenseRows();
  if (most == 0) return std::nullopt;
  const std::uint64_t kept = policies::KeepsUpTo(policy);
  left.reason = waits || most <= kept ? DenseReason::kTooShort : DenseReason::kNothingToDrop;
  if (most <= kept) left.needs = kept + 1;
  return left;
}

}  // namespace tessera::compaction
