#include "daemon/serving/describe.h"

#include <chrono>
#include <string>

#include "daemon/base/version.h"
#include "daemon/serving/convert.h"

namespace tessera::serving {

namespace {

std::uint32_t CountDecoding(cache::Tenant& tenant) {
  std::uint32_t decoding = 0;
  for (const std::shared_ptr<cache::Sequence>& sequence : tenant.Sequences()) {
    decoding += sequence->decoding();
  }
  return decoding;
}

std::uint64_t RingFullWaits(cache::Tenant& tenant) {
  cache::TenantCounters& counters = tenant.counters();
  for (const std::shared_ptr<cache::SessionState>& session : tenant.Sessions()) {
    counters.tail_full_waits.fetch_add(session->TakeRingFullWaits(), std::memory_order_relaxed);
  }
  return counters.tail_full_waits.load();
}

}  // namespace

void DescribeSequence(const cache::Sequence& sequence, bool lanes, v1::DescribeResponse& out) {
  const cache::Sequence::Description description = sequence.Describe(lanes);
  out.set_sequence_id(description.id.value());
  out.set_model_id(sequence.model().id().value());
  out.set_owner_session_id(description.owner.value());
  out.set_policy("dense");
  out.set_state(description.failed ? v1::SEQUENCE_STATE_FAILED : v1::SEQUENCE_STATE_LIVE);
  out.set_failure(description.failure);
  out.set_tokens(description.tokens);
  out.set_decoding(description.decoding);
  out.set_tile_bytes(description.tile_bytes);
  out.set_shared_tile_bytes(description.shared_tile_bytes);
  out.set_directory_offset(sequence.directory_offset());
  for (const cache::Sequence::LaneDescription& lane : description.lanes) {
    v1::LaneDescription& shown = *out.add_lane();
    shown.set_layer(lane.layer);
    shown.set_kv_head(lane.kv_head);
    shown.set_entries(lane.entries);
    shown.set_tail_entries(lane.tail_entries);
    shown.set_segments(lane.segments);
    shown.set_tile_bytes(lane.tile_bytes);
    for (const cache::SegmentRun& run : lane.runs) Describe(run, *shown.add_segment_run());
  }
}

void FillNodeStats(const Services& services, v1::StatsResponse& out) {
  const cache::Node& node = *services.node;
  out.set_version(std::string(Version()));
  out.set_device(services.device->description().name);
  out.set_implementation(services.device->description().kernels);
  out.set_uptime_seconds(
      std::chrono::duration<double>(services.clock->Now() - services.started).count());
  out.set_instance(node.instance());
  out.set_draining(services.draining.load());
  out.set_pool_limit_bytes(node.account().limit_bytes());
  out.set_pool_reserved_bytes(node.account().used_bytes());
  out.set_sessions(node.sessions());
}

void FillTenantStats(cache::Tenant& tenant, v1::TenantStats& out) {
  const cache::TenantCounters& counters = tenant.counters();
  out.set_name(tenant.name());
  out.set_used_bytes(tenant.account().used_bytes());
  out.set_hard_limit_bytes(tenant.account().limit_bytes());
  out.set_pool_extents(tenant.pool().extents());
  out.set_pool_extent_bytes(tenant.pool().extent_bytes());
  out.set_sequences(static_cast<std::uint32_t>(tenant.sequence_count()));
  out.set_decoding_sequences(CountDecoding(tenant));
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
  out.set_tail_full_waits(RingFullWaits(tenant));
  out.set_attend_requests(counters.attend_requests.load());
  out.set_sequences_failed(counters.sequences_failed.load());
  out.set_entries_packed(counters.entries_packed.load());
}

void NodeCollector::Collect(metrics::Visitor& visitor) const {
  const std::string& device = node_.options().device->description().name;
  visitor.Add(metrics::kSessions, node_.sessions());
  for (const std::unique_ptr<cache::Tenant>& tenant : node_.tenants()) {
    const std::string& name = tenant->name();
    const std::uint64_t used = tenant->pool().used_bytes();
    const std::uint64_t held = tenant->pool().extents() * tenant->pool().extent_bytes();
    visitor.Add(metrics::kPoolBytes, used, name, device, metrics::kPoolUsed);
    visitor.Add(metrics::kPoolBytes, held - used, name, device, metrics::kPoolFree);
    visitor.Add(metrics::kPoolBytes, node_.account().limit_bytes(), name, device,
                metrics::kPoolLimit);
    visitor.Add(metrics::kPoolExtents, tenant->pool().extents(), name, device);
    for (std::size_t tag = 0; tag < pool::kMemoryTags; ++tag) {
      const auto memory_tag = static_cast<pool::MemoryTag>(tag);
      visitor.Add(metrics::kPoolUsedBytes, tenant->account().used_bytes(memory_tag), name,
                  pool::TagName(memory_tag));
    }
    visitor.Add(metrics::kSequences, tenant->sequence_count(), name);
    visitor.Add(metrics::kDecodingSequences, CountDecoding(*tenant), name);
    visitor.Add(metrics::kEpochRetiredBytes, tenant->epochs().waiting_bytes());
    visitor.Add(metrics::kPinsRevokedTotal, tenant->epochs().revoked());
    const cache::TenantCounters& counters = tenant->counters();
    visitor.Add(metrics::kTokensAppendedTotal, counters.tokens_appended.load(), "rpc");
    visitor.Add(metrics::kTokensAppendedTotal, counters.tail_tokens_absorbed.load(), "tail");
    visitor.Add(metrics::kTilesEncodedTotal, counters.tiles_written.load());
    visitor.Add(metrics::kEntriesPackedTotal, counters.entries_packed.load());
    visitor.Add(metrics::kPackedBytesTotal, counters.pack_bytes_before.load(), "before");
    visitor.Add(metrics::kPackedBytesTotal, counters.pack_bytes_after.load(), "after");
    visitor.Add(metrics::kSelectRequestsTotal, counters.select_requests.load());
    visitor.Add(metrics::kSnapshotsPublishedTotal, counters.snapshots_published.load());
    visitor.Add(metrics::kSequencesFailedTotal, counters.sequences_failed.load());
    visitor.Add(metrics::kAttendRequestsTotal, counters.attend_requests.load(), "rpc");
    visitor.Add(metrics::kTailFullWaitsTotal, RingFullWaits(*tenant));
  }
}

}  // namespace tessera::serving
