#include "daemon/serving/convert/outcomes.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "daemon/base/check.h"

namespace tessera::serving {

namespace {

using compaction::DenseReason;
using compaction::LaneForm;
using compaction::LaneOutcome;
using LaneDescription = cache::Sequence::LaneDescription;

static_assert(static_cast<int>(DenseReason::kOther) == v1::COMPRESSION_REASON_OTHER);
static_assert(static_cast<int>(DenseReason::kNewest) == v1::COMPRESSION_REASON_NEWEST);
static_assert(static_cast<int>(LaneForm::kDense) == v1::LANE_STATE_DENSE);

bool SameRun(const cache::SegmentRun& a, const cache::SegmentRun& b) {
  return a.SameForm(b) && a.segments == b.segments && a.entries == b.entries &&
         a.tile_bytes == b.tile_bytes && a.first_position == b.first_position;
}

bool Unchanged(const LaneDescription& before, const LaneDescription& after) {
  return before.tokens == after.tokens && before.entries == after.entries &&
         before.position_shift == after.position_shift &&
         std::ranges::equal(before.runs, after.runs, SameRun);
}

}  // namespace

void Describe(const LaneOutcome& outcome, v1::LaneOutcome& out) {
  const compaction::DenseRows& dense = outcome.dense;
  out.set_state(static_cast<v1::LaneState>(outcome.form));
  out.set_reason(static_cast<v1::CompressionReason>(dense.reason));
  out.set_compressed_entries(outcome.compressed_entries);
  out.set_dense_entries(outcome.dense_entries);
  out.set_more_tokens(dense.more_tokens());
  out.set_text(compaction::TextOf(outcome));
  if (dense.reason != DenseReason::kLossAboveLimit) return;
  out.set_side(dense.of_value ? v1::LaneOutcome::SIDE_VALUE : v1::LaneOutcome::SIDE_KEY);
  out.set_loss(dense.loss);
  out.set_loss_limit(dense.limit);
}

google::protobuf::RepeatedPtrField<v1::OutcomeGroup> GroupOutcomes(
    std::span<const LaneDescription> lanes, std::span<const LaneOutcome> outcomes) {
  TESSERA_CHECK(lanes.size() == outcomes.size(), "there must be one outcome per lane");
  std::map<std::pair<LaneForm, DenseReason>, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    groups[{outcomes[i].form, outcomes[i].dense.reason}].push_back(i);
  }
  google::protobuf::RepeatedPtrField<v1::OutcomeGroup> all;
  for (const auto& [key, members] : groups) {
    std::size_t worst = members.front();
    for (const std::size_t member : members) {
      if (outcomes[member].WorseThan(outcomes[worst])) worst = member;
    }
    v1::OutcomeGroup& group = *all.Add();
    group.set_lanes(static_cast<std::uint32_t>(members.size()));
    group.set_layer(lanes[worst].layer);
    group.set_kv_head(lanes[worst].kv_head);
    Describe(outcomes[worst], *group.mutable_worst());
  }
  std::stable_sort(
      all.begin(), all.end(),
      [](const v1::OutcomeGroup& a, const v1::OutcomeGroup& b) { return a.lanes() > b.lanes(); });
  return all;
}

void NoteNothingNew(std::span<const LaneDescription> before, std::span<const LaneDescription> after,
                    std::span<LaneOutcome> outcomes) {
  for (std::size_t i = 0; i < outcomes.size() && i < before.size(); ++i) {
    if (outcomes[i].dense.reason != DenseReason::kNone || !Unchanged(before[i], after[i])) continue;
    outcomes[i].dense.reason = DenseReason::kNothingNew;
  }
}

}  // namespace tessera::serving
