#include "daemon/serving/rpc/describe.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/convert/outcomes.h"

namespace tessera::serving {

namespace {

// What lanes hold, compared with what they were given.
struct Kept {
  double entries = 0;
  double elements = 0;
  double bytes = 0;
  double tokens = 0;
  double all_elements = 0;
  double all_bytes = 0;

  void Add(const cache::Model& model, const cache::Sequence::LaneDescription& lane) {
    const auto given = static_cast<double>(lane.tokens);
    const double dense = given * model.geometry(lane.layer).head_dim;
    tokens += given;
    all_elements += dense;
    all_bytes += dense * 2 * static_cast<double>(kernels::ElementBytes(model.spec().type));
    for (const cache::SegmentRun& run : lane.runs) {
      const auto count = static_cast<double>(run.entries);
      entries += count;
      elements += count * (run.shape.key.kept + run.shape.value.kept) / 2;
      bytes += static_cast<double>(run.tile_bytes + run.rotation_bytes + run.table_bytes +
                                   run.stored_bytes);
    }
  }
  // Sets the three ratios, unless no tokens were given.
  template <typename Message>
  void Write(Message& out) const {
    if (tokens == 0) return;
    out.set_tokens_kept(entries / tokens);
    out.set_elements_kept(elements / all_elements);
    out.set_bytes_kept(bytes / all_bytes);
  }
};

// Describes all lanes together.
void DescribeKept(const cache::Model& model,
                  std::span<const cache::Sequence::LaneDescription> lanes,
                  v1::DescribeResponse& out) {
  Kept kept;
  for (const cache::Sequence::LaneDescription& lane : lanes) {
    kept.Add(model, lane);
    for (const cache::SegmentRun& run : lane.runs) {
      out.set_offloaded_bytes(out.offloaded_bytes() + run.stored_bytes);
      out.set_rotation_bytes(out.rotation_bytes() + run.rotation_bytes);
      out.set_table_bytes(out.table_bytes() + run.table_bytes);
      out.set_raw_copy_bytes(out.raw_copy_bytes() + run.raw_bytes);
    }
  }
  kept.Write(out);
}

}  // namespace

v1::SequenceState StateOf(const cache::Sequence::Description& description) {
  if (description.failed) return v1::SEQUENCE_STATE_FAILED;
  return description.offloaded ? v1::SEQUENCE_STATE_OFFLOADED : v1::SEQUENCE_STATE_LIVE;
}

absl::Status DescribeSequence(const Services& services, const cache::Sequence& sequence,
                              const v1::DescribeRequest& request, v1::DescribeResponse& out) {
  using Detail = cache::Sequence::Detail;
  const cache::Sequence::Description description =
      sequence.Describe(request.entries() ? Detail::kEntries : Detail::kLanes);
  out.set_sequence_id(description.id.value());
  out.set_model_id(sequence.model().id().value());
  out.set_owner_session_id(description.owner.value());
  const policies::Policy policy = compaction::Compactor::PolicyOf(sequence);
  out.set_policy(policy.text);
  if (auto needs = ToPolicyNeeds(policy)) *out.mutable_needs() = *std::move(needs);
  out.set_decided_tokens(compaction::Compactor::DecidedOf(sequence));
  if (policy.selection.has_value()) Describe(*policy.selection, *out.mutable_selection());
  out.set_state(StateOf(description));
  out.set_failure(description.failure);
  out.set_tokens(description.tokens);
  out.set_decoding(description.decoding);
  out.set_tile_bytes(description.tile_bytes);
  out.set_shared_tile_bytes(description.shared_tile_bytes);
  out.set_position_shift(sequence.position_shift());
  out.set_directory_offset(sequence.directory_offset());
  DescribeKept(sequence.model(), description.lanes, out);
  const std::vector<compaction::LaneOutcome> outcomes =
      compaction::Compactor::OutcomesOf(sequence, description.lanes);
  *out.mutable_outcomes() = GroupOutcomes(description.lanes, outcomes);
  if (!request.lanes() && !request.entries()) return absl::OkStatus();
  for (std::size_t i = 0; i < description.lanes.size(); ++i) {
    const cache::Sequence::LaneDescription& lane = description.lanes[i];
    v1::LaneDescription& shown = *out.add_lane();
    Describe(outcomes[i], *shown.mutable_outcome());
    shown.set_layer(lane.layer);
    shown.set_kv_head(lane.kv_head);
    shown.set_entries(lane.entries);
    shown.set_tail_entries(lane.tail_entries);
    shown.set_segments(lane.segments);
    shown.set_tile_bytes(lane.tile_bytes);
    shown.set_tokens(lane.tokens);
    Kept kept;
    kept.Add(sequence.model(), lane);
    kept.Write(shown);
    for (cache::SegmentRun run : lane.runs) {
      if (run.provisional) {
        const kernels::Loss loss = compaction::Compactor::LossOf(
            sequence, sequence.model().layout().lane(lane.layer, lane.kv_head));
        run.loss = {.key = loss.key, .value = loss.value};
      }
      Describe(run, *shown.add_segment_run());
    }
    shown.mutable_position()->Add(lane.positions.begin(), lane.positions.end());
    if (std::ranges::all_of(lane.weights, [](float weight) { return weight == 1; })) continue;
    shown.mutable_weight()->Add(lane.weights.begin(), lane.weights.end());
  }
  if (out.ByteSizeLong() <= services.max_message_bytes) return absl::OkStatus();
  const std::size_t bytes = out.ByteSizeLong();
  out.Clear();
  return absl::ResourceExhaustedError(
      Concat("the description would have ", bytes, " bytes; the largest message is ",
             services.max_message_bytes, request.entries() ? "; ask without entries" : ""));
}

void Describe(const Clock& clock, const cache::PrefixStore::Description& prefix,
              v1::PrefixInfo& out) {
  const auto seconds = [](Clock::Duration time) {
    return std::chrono::duration<double>(time).count();
  };
  const cache::Prefix::Options& options = prefix.prefix->options();
  const cache::Sequence::Description held = options.sequence->Describe(/*lanes=*/false);
  out.set_prefix_id(prefix.prefix->id().value());
  out.set_model(options.sequence->model().spec().name);
  out.set_policy(options.policy);
  out.set_rank(options.rank);
  out.set_group_size(options.group_size);
  out.set_tokens(options.tokens);
  out.set_tile_bytes(held.tile_bytes);
  out.set_shared_tile_bytes(held.shared_tile_bytes);
  out.set_offloaded_bytes(held.stored_bytes);
  out.set_references(options.forks->count());
  out.set_age_seconds(seconds(clock.Now() - options.published));
  out.set_idle_seconds(seconds(prefix.idle));
  out.set_ttl_seconds(seconds(prefix.life.ttl));
  out.set_pinned(prefix.life.pinned);
}

namespace {

void FillCompaction(const Services& services, v1::CompactionStats& out) {
  const Scheduler::Load load = services.scheduler->load();
  for (std::size_t i = 0; i < kJobPriorities; ++i) {
    out.add_jobs_queued(load.queued[i]);
    out.add_jobs_running(load.running[i]);
    out.add_jobs_done(load.done[i]);
  }
  const compaction::CodingCounters& counters = services.compactor->counters();
  out.set_tiles_encoded(counters.tiles_encoded.load());
  out.set_segments_sealed(counters.segments_sealed.load());
  out.set_strategies_made(counters.strategies_made.load());
  out.set_ends_left_plain(counters.left_plain.load());
  for (std::size_t i = 1; i < compaction::kDenseReasons; ++i) {
    const std::uint64_t times = counters.left_dense[i].load();
    if (times == 0) continue;
    (*out.mutable_left_dense())[std::string(
        compaction::NameOf(static_cast<compaction::DenseReason>(i)))] = times;
  }
  out.set_raw_rows_dropped(counters.raw_rows_dropped.load());
  out.set_raw_copy_bytes(services.node->host_rows().used_bytes());
  out.set_token_choices(counters.decisions_made.load());
  out.set_token_choice_seconds(static_cast<double>(counters.decision_ns.load()) * 1e-9);
  out.set_raw_copy_limit_bytes(services.node->host_rows().limit_bytes());
}

}  // namespace

void FillNodeStats(const Services& services, v1::StatsResponse& out) {
  const cache::Node& node = *services.node;
  out.set_version(std::string(Version()));
  out.set_device(services.device->description().name);
  out.set_device_uuid(services.device->description().UuidText());
  out.set_device_model(services.device->description().model);
  out.set_implementation(services.device->description().kernels);
  out.set_uptime_seconds(
      std::chrono::duration<double>(services.clock->Now() - services.started).count());
  out.set_instance(node.instance());
  out.set_draining(services.draining.load());
  out.set_pool_limit_bytes(node.account().limit_bytes());
  out.set_pool_reserved_bytes(node.account().used_bytes());
  out.set_sessions(node.sessions());
  FillCompaction(services, *out.mutable_compaction());
  out.set_host_tier_bytes(node.host_tier().used_bytes());
  out.set_host_tier_limit_bytes(node.host_tier().limit_bytes());
  out.set_pressure_calls_served(services.pressure->counters().served.load());
  out.set_pressure_calls_refused(services.pressure->counters().refused.load());
}

void FillTenantStats(cache::Tenant& tenant, v1::TenantStats& out) {
  tenant.CountWork();
  const cache::TenantCounters& counters = tenant.counters();
  const cache::Tenant::SequenceCounts sequences = tenant.CountSequences();
  out.set_name(tenant.name());
  out.set_used_bytes(tenant.account().used_bytes());
  out.set_hard_limit_bytes(tenant.account().limit_bytes());
  out.set_pool_extents(tenant.pool().extents());
  out.set_pool_extent_bytes(tenant.pool().extent_bytes());
  out.set_sequences(sequences.held + sequences.decoding + sequences.offloaded);
  out.set_decoding_sequences(sequences.decoding);
  out.set_sessions(static_cast<std::uint32_t>(tenant.Sessions().size()));
  for (std::size_t tag = 0; tag < pool::kMemoryTags; ++tag) {
    const std::uint64_t bytes = tenant.account().used_bytes(static_cast<pool::MemoryTag>(tag));
    if (bytes == 0) continue;
    (*out.mutable_used_bytes_by_tag())[std::string(
        pool::TagName(static_cast<pool::MemoryTag>(tag)))] = bytes;
  }
  out.set_tokens_appended(counters.tokens_appended.load());
  out.set_tail_tokens_absorbed(counters.tail_tokens_absorbed.load());
  out.set_tiles_written(counters.tiles_written.load());
  out.set_retired_bytes(tenant.epochs().waiting_bytes());
  out.set_pins_revoked(tenant.epochs().revoked());
  out.set_tail_full_waits(counters.tail_full_waits.load());
  out.set_attend_requests(counters.attend_requests.load());
  out.set_sequences_failed(counters.sequences_failed.load());
  out.set_entries_packed(counters.entries_packed.load());
  out.set_entries_dropped(counters.entries_dropped.load());
  const cache::PrefixStore::Figures prefixes = tenant.prefixes().figures();
  out.set_prefixes(prefixes.prefixes);
  out.set_prefix_bytes(prefixes.tile_bytes);
  out.set_prefix_waits(prefixes.waiting);
  out.set_soft_limit_bytes(tenant.soft_limit_bytes());
  out.set_offloaded_bytes(tenant.offloaded().used_bytes());
  out.set_offloaded_sequences(sequences.offloaded);
  out.set_offloads(counters.offloads.load());
  out.set_restores(counters.restores.load());
  out.set_observation_bytes(tenant.host_rows().used_bytes(pool::MemoryTag::kObservations));
}

}  // namespace tessera::serving
