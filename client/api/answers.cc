#include "client/api/answers.h"

#include <utility>

namespace tessera::client {

namespace {

static_assert(static_cast<int>(SequenceStatus::kLive) == v1::SEQUENCE_STATE_LIVE);
static_assert(static_cast<int>(SequenceStatus::kFailed) == v1::SEQUENCE_STATE_FAILED);
static_assert(static_cast<int>(SequenceStatus::kOffloaded) == v1::SEQUENCE_STATE_OFFLOADED);

static_assert(static_cast<int>(LaneState::kDense) == v1::LANE_STATE_DENSE);
static_assert(static_cast<int>(CompressionReason::kOther) == v1::COMPRESSION_REASON_OTHER);
static_assert(static_cast<int>(CompressionReason::kNewest) == v1::COMPRESSION_REASON_NEWEST);

LaneOutcome OutcomeOf(const v1::LaneOutcome& outcome) {
  // A newer daemon may have more of both.
  const bool knows_state = v1::LaneState_IsValid(outcome.state());
  const bool knows_reason = v1::CompressionReason_IsValid(outcome.reason());
  return {.state = knows_state ? static_cast<LaneState>(outcome.state()) : LaneState::kUnknown,
          .reason = knows_reason ? static_cast<CompressionReason>(outcome.reason())
                                 : CompressionReason::kOther,
          .compressed_entries = outcome.compressed_entries(),
          .dense_entries = outcome.dense_entries(),
          .loss = outcome.loss(),
          .loss_limit = outcome.loss_limit(),
          .of_values = outcome.side() == v1::LaneOutcome::SIDE_VALUE,
          .more_tokens = outcome.more_tokens(),
          .text = outcome.text()};
}

std::vector<OutcomeGroup> OutcomesOf(
    const google::protobuf::RepeatedPtrField<v1::OutcomeGroup>& groups) {
  std::vector<OutcomeGroup> outcomes;
  for (const v1::OutcomeGroup& group : groups) {
    outcomes.push_back({.lanes = group.lanes(),
                        .layer = group.layer(),
                        .kv_head = group.kv_head(),
                        .worst = OutcomeOf(group.worst())});
  }
  return outcomes;
}

SegmentRun RunOf(const v1::SegmentRun& run) {
  return {.segments = run.segments(),
          .entries = run.entries(),
          .first_position = run.first_position(),
          .format = run.format(),
          .channels = run.channels(),
          .kept_channels = run.kept_channels(),
          .value_channels = run.value_channels(),
          .value_kept_channels = run.value_kept_channels(),
          .group = run.group(),
          .summary = static_cast<Summary>(run.summary()),
          .block = run.block(),
          .tile_bytes = run.tile_bytes(),
          .rotation_bytes = run.rotation_bytes(),
          .table_bytes = run.table_bytes(),
          .summary_bytes = run.summary_bytes(),
          .provisional = run.provisional(),
          .key_loss = run.key_loss(),
          .value_loss = run.value_loss()};
}

LaneDescription LaneOf(const v1::LaneDescription& lane) {
  LaneDescription description = {.layer = lane.layer(),
                                 .kv_head = lane.kv_head(),
                                 .tokens = lane.tokens(),
                                 .entries = lane.entries(),
                                 .tail_entries = lane.tail_entries(),
                                 .segments = lane.segments(),
                                 .tile_bytes = lane.tile_bytes(),
                                 .tokens_kept = lane.tokens_kept(),
                                 .elements_kept = lane.elements_kept(),
                                 .bytes_kept = lane.bytes_kept(),
                                 .positions = {lane.position().begin(), lane.position().end()},
                                 .weights = {lane.weight().begin(), lane.weight().end()},
                                 .outcome = OutcomeOf(lane.outcome())};
  for (const v1::SegmentRun& run : lane.segment_run()) description.runs.push_back(RunOf(run));
  return description;
}

}  // namespace

PolicyNeeds FromProto(const v1::PolicyNeeds& needs) {
  return {.last_queries = needs.last_queries(),
          .last_share = needs.last_share(),
          .norm_share = needs.norm_share(),
          .attention_sums = needs.attention_sums(),
          .token_ids = needs.token_ids(),
          .decode_queries = needs.decode_queries(),
          .acts_while_decoding = needs.acts_while_decoding(),
          .layers_alike = needs.layers_alike()};
}

CompressResult FromProto(const v1::CompressResponse& response) {
  return {.entries_packed = response.entries_packed(),
          .entries_left = response.entries_left(),
          .entries_dropped = response.entries_dropped(),
          .tile_bytes_before = response.tile_bytes_before(),
          .tile_bytes_after = response.tile_bytes_after(),
          .rotation_bytes = response.rotation_bytes(),
          .position_shift = response.position_shift(),
          .decided_tokens = {response.decided_tokens().begin(), response.decided_tokens().end()},
          .outcomes = OutcomesOf(response.outcomes())};
}

SelectResult FromProto(const v1::SelectResponse& response) {
  SelectResult result = {.tokens = response.tokens()};
  for (const v1::HeadSelection& head : response.heads()) {
    HeadSelection selection = {.kv_head = head.kv_head(),
                               .query_head = head.query_head(),
                               .query = head.query(),
                               .selected_entries = head.selected_entries(),
                               .entries_without_summary = head.entries_without_summary(),
                               .tail_entries = head.tail_entries(),
                               .visible_entries = head.visible_entries()};
    for (const v1::PositionRun& run : head.runs()) {
      selection.runs.push_back({run.first_position(), run.entries()});
    }
    result.heads.push_back(std::move(selection));
  }
  return result;
}

SequenceDescription FromProto(const v1::DescribeResponse& response) {
  SequenceDescription description = {.id = SequenceId(response.sequence_id()),
                                     .policy = response.policy(),
                                     .status = static_cast<SequenceStatus>(response.state()),
                                     .failure = response.failure(),
                                     .tokens = response.tokens(),
                                     .decoding = response.decoding(),
                                     .tile_bytes = response.tile_bytes(),
                                     .shared_tile_bytes = response.shared_tile_bytes(),
                                     .rotation_bytes = response.rotation_bytes(),
                                     .table_bytes = response.table_bytes(),
                                     .raw_copy_bytes = response.raw_copy_bytes(),
                                     .offloaded_bytes = response.offloaded_bytes(),
                                     .position_shift = response.position_shift(),
                                     .tokens_kept = response.tokens_kept(),
                                     .elements_kept = response.elements_kept(),
                                     .bytes_kept = response.bytes_kept(),
                                     .outcomes = OutcomesOf(response.outcomes())};
  for (const v1::LaneDescription& lane : response.lane()) {
    description.lanes.push_back(LaneOf(lane));
  }
  return description;
}

DaemonStats FromProto(const v1::StatsResponse& response) {
  DaemonStats stats = {.version = response.version(),
                       .device = response.device(),
                       .device_uuid = response.device_uuid(),
                       .implementation = response.implementation(),
                       .uptime = std::chrono::duration<double>(response.uptime_seconds()),
                       .draining = response.draining(),
                       .sessions = response.sessions(),
                       .pool_limit_bytes = response.pool_limit_bytes(),
                       .pool_reserved_bytes = response.pool_reserved_bytes(),
                       .host_tier_bytes = response.host_tier_bytes(),
                       .host_tier_limit_bytes = response.host_tier_limit_bytes()};
  if (response.tenants_size() == 0) return stats;
  const v1::TenantStats& tenant = response.tenants(0);
  stats.tenant = {.name = tenant.name(),
                  .used_bytes = tenant.used_bytes(),
                  .hard_limit_bytes = tenant.hard_limit_bytes(),
                  .soft_limit_bytes = tenant.soft_limit_bytes(),
                  .sequences = tenant.sequences(),
                  .decoding_sequences = tenant.decoding_sequences(),
                  .prefixes = tenant.prefixes(),
                  .prefix_bytes = tenant.prefix_bytes(),
                  .tokens_appended = tenant.tokens_appended(),
                  .offloaded_bytes = tenant.offloaded_bytes(),
                  .offloaded_sequences = tenant.offloaded_sequences()};
  return stats;
}

DaemonInfo FromProto(const v1::Welcome& welcome) {
  return {.tenant = welcome.tenant(),
          .device = welcome.device(),
          .device_uuid = welcome.device_uuid_text(),
          .tail_ring_tiles = welcome.tail_ring_tiles(),
          .max_message_bytes = welcome.max_message_bytes(),
          .staging_bytes = welcome.staging_bytes(),
          .prefix_hash = welcome.prefix_hash(),
          .prefix_hash_seed = welcome.prefix_hash_seed(),
          .pin_limit = std::chrono::milliseconds(welcome.pin_limit_ms())};
}

}  // namespace tessera::client
