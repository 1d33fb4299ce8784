// Reports the outcome of compression by lane, and ends prompts without new rows.

#include <algorithm>
#include <utility>

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/compactor_jobs.h"
#include "daemon/policies/plan.h"

namespace tessera::compaction {

namespace {

// The outcome of rows that no job has tried to compress. `tokens`: of the lane.
DenseRows Waiting(const policies::Policy& policy, std::uint64_t tokens) {
  DenseRows waiting = {.reason = DenseReason::kWaiting, .tokens = tokens};
  if (policy.mosaic.has_value()) {
    const policies::SegmentOptions& segments = policy.mosaic->segments;
    // Both take whole tiles.
    constexpr std::uint64_t kTile = kernels::kTileEntries;
    const std::uint64_t newest = segments.recent == 0 ? 0 : segments.recent + kTile;
    const std::uint64_t sinks = (segments.sinks + kTile - 1) / kTile * kTile;
    if (tokens <= newest + sinks) {
      waiting.reason = DenseReason::kNewest;
      return waiting;
    }
    waiting.needs = std::min(segments.min_tokens, segments.tokens);
  } else if (policy.uses_books()) {
    const policies::PlanesPolicy planes = policy.book_options();
    const std::uint64_t dense = planes.recent + planes.sinks;
    if (tokens <= dense + 2 * kernels::kTileEntries) {
      waiting.reason = DenseReason::kNewest;
      return waiting;
    }
    waiting.needs =
        dense + (planes.has_book_of_file() ? 2 * kernels::kTileEntries : planes.book_rows);
  } else if (policy.summaries.has_value()) {
    waiting.needs = kernels::kTileEntries;
  }
  return waiting;
}

bool IsCompressed(const cache::SegmentRun& run) {
  return run.shape.packed() || run.shape.summary != kernels::Summary::kNone;
}

LaneOutcome OutcomeOf(const cache::Sequence::LaneDescription& lane, const policies::Policy& policy,
                      const DenseRows& of_lane, const DenseRows& of_layer,
                      std::uint64_t decided_until) {
  LaneOutcome outcome = {.tokens = lane.tokens};
  for (const cache::SegmentRun& run : lane.runs) {
    (IsCompressed(run) ? outcome.compressed_entries : outcome.dense_entries) += run.entries;
  }
  const bool fewer = lane.entries < lane.tokens;
  const bool reads_all =  // a layer without a selection has no summaries
      policy.summaries.has_value() && !policies::SelectionOf(policy, lane.layer).has_value();
  if (reads_all && !policy.chooses()) {
    outcome.form = LaneForm::kDense;
    outcome.dense.reason = DenseReason::kPolicyDense;
    return outcome;
  }
  if (LeavesRows(policy) || reads_all) {  // the policy only chooses
    outcome.dense = of_layer;
    const bool asked = decided_until > 0 || of_layer.reason != DenseReason::kNone;
    if (!asked && lane.entries > 0) outcome.dense = Waiting(policy, lane.tokens);
    const bool done = outcome.dense.reason == DenseReason::kNone;
    outcome.form = done ? LaneForm::kCompressed : fewer ? LaneForm::kPartly : LaneForm::kDense;
    return outcome;
  }
  if (outcome.dense_entries == 0) {
    outcome.form = LaneForm::kCompressed;
    return outcome;
  }
  outcome.form = outcome.compressed_entries > 0 || fewer ? LaneForm::kPartly : LaneForm::kDense;
  outcome.dense = of_lane.reason != DenseReason::kNone ? of_lane : of_layer;
  if (outcome.dense.reason == DenseReason::kNone) {
    outcome.dense = Waiting(policy, outcome.dense_entries);
  }
  return outcome;
}

}  // namespace

std::vector<LaneOutcome> Compactor::OutcomesOf(
    const cache::Sequence& sequence, std::span<const cache::Sequence::LaneDescription> lanes) {
  const std::shared_ptr<const ManagedSequence> managed = ManagedSequence::Of(sequence);
  std::vector<LaneOutcome> outcomes;
  for (const cache::Sequence::LaneDescription& lane : lanes) {
    if (managed == nullptr || managed->policy().dense()) {
      // Packed by an earlier policy or an explicit packing: nothing more is requested.
      LaneOutcome outcome = {.tokens = lane.tokens};
      for (const cache::SegmentRun& run : lane.runs) {
        (IsCompressed(run) ? outcome.compressed_entries : outcome.dense_entries) += run.entries;
      }
      const bool any = outcome.compressed_entries > 0;
      outcome.form = !any                         ? LaneForm::kDense
                     : outcome.dense_entries == 0 ? LaneForm::kCompressed
                                                  : LaneForm::kPartly;
      if (outcome.form != LaneForm::kCompressed) outcome.dense.reason = DenseReason::kPolicyDense;
      outcomes.push_back(std::move(outcome));
      continue;
    }
    const std::uint32_t index = sequence.model().layout().lane(lane.layer, lane.kv_head);
    const ManagedLane* const held = managed->FindLane(index);
    outcomes.push_back(
        OutcomeOf(lane, managed->policy(), held == nullptr ? DenseRows() : held->left_dense.Get(),
                  managed->layer(lane.layer).left_dense.Get(), managed->decided_until(lane.layer)));
  }
  return outcomes;
}

void Compactor::Note(DenseRecord& record, DenseRows rows, std::uint32_t lanes) {
  if (rows.reason != DenseReason::kNone) {
    counters_.left_dense[static_cast<std::size_t>(rows.reason)].fetch_add(
        lanes, std::memory_order_relaxed);
  }
  record.Set(std::move(rows));
}

absl::Status Compactor::EndPrompt(const std::shared_ptr<cache::Sequence>& sequence,
                                  std::uint32_t first_layer, std::uint32_t layers) {
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*sequence);
  if (managed == nullptr) return absl::OkStatus();
  // Tokens decoded so far are included. Where positions move, Compress closes the tail instead.
  if (!policies::MovesPositions(managed->policy())) {
    if (absl::Status status = sequence->AbsorbTail(); !status.ok()) return status;
  }
  // The pause keeps the layer from being truncated between reading its length and the request.
  const ManagedSequence::Pause pause(*managed);
  if (ManagedSequence::Of(*sequence) != managed) return internal::PolicyChanged(*sequence);
  for (std::uint32_t layer = first_layer; layer < first_layer + layers; ++layer) {
    const absl::StatusOr<std::uint64_t> tokens = sequence->TokensOfLayer(layer);
    if (!tokens.ok()) return tokens.status();
    if (*tokens == 0) continue;
    AfterAppend(sequence, managed,
                {.first_layer = layer,
                 .layers = 1,
                 .end_of_prompt = true,
                 .first_token = *tokens,
                 .until = *tokens},
                /*end_wanted=*/false);
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
