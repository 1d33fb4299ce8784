#include "daemon/serving/node_collector.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string_view>

#include "daemon/policies/registry.h"
#include "daemon/serving/call/readiness.h"
#include "daemon/serving/tls.h"

namespace tessera::serving {

namespace {

double Seconds(Clock::Duration duration) { return std::chrono::duration<double>(duration).count(); }

// Memory tags with a series of their own. All other tags together are reported as "other".
constexpr pool::MemoryTag kReportedTags[] = {pool::MemoryTag::kTiles, pool::MemoryTag::kTails,
                                             pool::MemoryTag::kStaging,
                                             pool::MemoryTag::kSnapshots};

}  // namespace

void NodeCollector::CollectState(metrics::Visitor& visitor) const {
  const std::string& device = services_.device->description().name;
  visitor.Add(metrics::kReady, Readiness(services_).ok());
  visitor.Add(metrics::kDraining, services_.draining.load());
  visitor.Add(metrics::kDeviceHealthy, services_.device->health().ok(), device);
  visitor.Add(metrics::kSessions, node_.sessions());
  visitor.Add(metrics::kLogDroppedTotal, services_.logger->dropped_lines());
  if (certificate_.empty()) return;
  if (const auto expiry = CertificateExpiry(certificate_); expiry.ok()) {
    visitor.Add(metrics::kTlsCertificateExpiry, *expiry);
  }
}

void NodeCollector::CollectMemory(metrics::Visitor& visitor) const {
  const std::string& device = services_.device->description().name;
  visitor.Add(metrics::kPoolReservedBytes, node_.account().used_bytes(), device);
  visitor.Add(metrics::kPoolLimitBytes, node_.account().limit_bytes(), device);
  const pool::Account& host = node_.host_rows();
  visitor.Add(metrics::kRawCopyBytes, host.used_bytes(pool::MemoryTag::kRawCopies));
  visitor.Add(metrics::kObservationBytes, host.used_bytes(pool::MemoryTag::kObservations));
  visitor.Add(metrics::kRawCopyLimitBytes, host.limit_bytes());
  const tiers::HostTier& tier = node_.host_tier();
  constexpr std::string_view kHost = "host";
  visitor.Add(metrics::kHostTierLimitBytes, tier.limit_bytes());
  visitor.Add(metrics::kTierBytes, tier.used_bytes(), kHost);
  visitor.Add(metrics::kTierErrorsTotal, tier.transfers().errors.load(), kHost);
  tier.transfers().durations.Visit(visitor, metrics::kTierSeconds.view(), std::array{kHost});
}

void NodeCollector::CollectJobs(metrics::Visitor& visitor) const {
  constexpr std::string_view kPriorities[kJobPriorities] = {"tails", "seals", "pressure"};
  const Scheduler::Load load = services_.scheduler->load();
  for (std::size_t i = 0; i < kJobPriorities; ++i) {
    visitor.Add(metrics::kBackgroundJobs, load.queued[i], kPriorities[i], "queued");
    visitor.Add(metrics::kBackgroundJobs, load.running[i], kPriorities[i], "running");
    visitor.Add(metrics::kBackgroundJobsTotal, load.done[i], kPriorities[i]);
    visitor.Add(metrics::kBackgroundOldestJobSeconds, Seconds(load.oldest[i]), kPriorities[i]);
  }
}

void NodeCollector::CollectCompaction(metrics::Visitor& visitor) const {
  const compaction::CodingCounters& counters = services_.compactor->counters();
  visitor.Add(metrics::kProvisionalTilesTotal, counters.tiles_encoded.load());
  visitor.Add(metrics::kSegmentsSealedTotal, counters.segments_sealed.load());
  visitor.Add(metrics::kStrategiesTotal, counters.strategies_made.load());
  visitor.Add(metrics::kSegmentsStoredDenseTotal, counters.left_plain.load());
  for (std::size_t i = 0; i < compaction::kDenseReasons; ++i) {
    const auto reason = static_cast<compaction::DenseReason>(i);
    if (!compaction::IsCounted(reason)) continue;
    visitor.Add(metrics::kSegmentsLeftDenseTotal, counters.left_dense[i].load(),
                compaction::NameOf(reason));
  }
  visitor.Add(metrics::kTokenChoicesTotal, counters.decisions_made.load());
  visitor.Add(metrics::kTokenChoiceSecondsTotal,
              static_cast<double>(counters.decision_ns.load()) * 1e-9);
  visitor.Add(metrics::kObservedBytesTotal, counters.shown_bytes.load());
  visitor.Add(metrics::kRawRowsDroppedTotal, counters.raw_rows_dropped.load());
  for (std::size_t i = 0; i < policies::kSystems; ++i) {
    const std::string_view policy = policies::Systems()[i]->name;
    const cache::ReplacedBytes& replaced = counters.replaced_by_system[i];
    visitor.Add(metrics::kPolicyBytesTotal, replaced.before.load(), policy, "before");
    visitor.Add(metrics::kPolicyBytesTotal, replaced.after.load(), policy, "after");
  }
}

void NodeCollector::CollectPressure(metrics::Visitor& visitor) const {
  const residency::Pressure& pressure = *services_.pressure;
  for (std::size_t rung = 0; rung < pressure.ladder().size(); ++rung) {
    for (std::size_t i = 0; i < residency::kOutcomes; ++i) {
      visitor.Add(metrics::kPressureClimbsTotal, pressure.counters().rungs[rung].climbs[i].load(),
                  pressure.ladder()[rung]->name(),
                  residency::OutcomeName(static_cast<residency::Outcome>(i)));
    }
    visitor.Add(metrics::kPressureStepsTotal, pressure.counters().rungs[rung].steps.load(),
                pressure.ladder()[rung]->name());
  }
}

void NodeCollector::CollectTenant(cache::Tenant& tenant, metrics::Visitor& visitor) const {
  const std::string& name = tenant.name();
  const pool::Account& account = tenant.account();
  const std::uint64_t used = account.used_bytes();
  visitor.Add(metrics::kTenantUsedBytes, used, name);
  visitor.Add(metrics::kTenantSoftLimitBytes, tenant.soft_limit_bytes(), name);
  visitor.Add(metrics::kTenantHardLimitBytes, account.limit_bytes(), name);
  std::uint64_t reported = 0;
  for (const pool::MemoryTag tag : kReportedTags) {
    const std::uint64_t bytes = account.used_bytes(tag);
    reported += bytes;
    visitor.Add(metrics::kTenantMemoryBytes, bytes, name, pool::TagName(tag));
  }
  // Charges may change between the readings.
  visitor.Add(metrics::kTenantMemoryBytes, used - std::min(used, reported), name, "other");

  const cache::Tenant::SequenceCounts sequences = tenant.CountSequences();
  visitor.Add(metrics::kSequences, sequences.held, name, "held");
  visitor.Add(metrics::kSequences, sequences.decoding, name, "decoding");
  visitor.Add(metrics::kSequences, sequences.offloaded, name, "offloaded");
  visitor.Add(metrics::kSequenceTokens, sequences.tokens, name);

  const residency::Pressure::Refusals& refusals = services_.pressure->refusals(tenant);
  visitor.Add(metrics::kMemoryRefusalsTotal, refusals.quota.load(), name, "quota");
  visitor.Add(metrics::kMemoryRefusalsTotal, refusals.node.load(), name, "node");
  visitor.Add(metrics::kSequencesFailedTotal, tenant.counters().sequences_failed.load(), name);
  visitor.Add(metrics::kPinsRevokedTotal, tenant.epochs().revoked(), name);
}

void NodeCollector::CollectWork(cache::Tenant& tenant, metrics::Visitor& visitor) {
  tenant.CountWork();
  const cache::TenantCounters& counters = tenant.counters();
  visitor.Add(metrics::kEpochRetiredBytes, tenant.epochs().waiting_bytes());
  visitor.Add(metrics::kTokensCommittedTotal, counters.tokens_appended.load(), "rpc");
  visitor.Add(metrics::kTokensCommittedTotal, counters.tokens_committed.load(), "mapped");
  visitor.Add(metrics::kTilesEncodedTotal, counters.tiles_written.load());
  visitor.Add(metrics::kEntriesPackedTotal, counters.entries_packed.load());
  visitor.Add(metrics::kEntriesDroppedTotal, counters.entries_dropped.load());
  visitor.Add(metrics::kPackedBytesTotal, counters.pack_bytes_before.load(), "before");
  visitor.Add(metrics::kPackedBytesTotal, counters.pack_bytes_after.load(), "after");
  visitor.Add(metrics::kSelectRequestsTotal, counters.select_requests.load());
  visitor.Add(metrics::kAttendRequestsTotal, counters.attend_requests.load());
  visitor.Add(metrics::kMovesTotal, counters.offloads.load(), "offload");
  visitor.Add(metrics::kMovesTotal, counters.restores.load(), "restore");
  visitor.Add(metrics::kMovedBytesTotal, counters.offloaded_bytes.load(), "offload");
  visitor.Add(metrics::kMovedBytesTotal, counters.restored_bytes.load(), "restore");
  visitor.Add(metrics::kSnapshotsPublishedTotal, counters.snapshots_published.load());
  visitor.Add(metrics::kTailFullWaitsTotal, counters.tail_full_waits.load());
  counters.step_waits.Visit(visitor, metrics::kDecodeWaitSeconds.view(), {});
  counters.restore_times.Visit(visitor, metrics::kRestoreSeconds.view(), {});
  counters.match_waits.Visit(visitor, metrics::kMatchWaitSeconds.view(), {});
}

void NodeCollector::CollectPrefixes(cache::Tenant& tenant, metrics::Visitor& visitor) {
  const cache::PrefixStore::Figures figures = tenant.prefixes().figures();
  const std::string& name = tenant.name();
  visitor.Add(metrics::kPrefixes, figures.prefixes, name);
  visitor.Add(metrics::kPrefixBytes, figures.tile_bytes, name);
  visitor.Add(metrics::kPrefixMatchTokensTotal, figures.tokens_asked, name, "asked");
  visitor.Add(metrics::kPrefixMatchTokensTotal, figures.tokens_found, name, "found");
  visitor.Add(metrics::kPrefixWaits, figures.waiting);
  visitor.Add(metrics::kPrefixMatchesTotal, figures.matches_whole, "all");
  visitor.Add(metrics::kPrefixMatchesTotal, figures.matches_part, "part");
  visitor.Add(metrics::kPrefixMatchesTotal, figures.matches_nothing, "nothing");
  visitor.Add(metrics::kPrefixesPublishedTotal, figures.published, "new");
  visitor.Add(metrics::kPrefixesPublishedTotal, figures.deduplicated, "known");
  constexpr std::string_view kReasons[cache::kDropReasons] = {"expired", "least_recently_used",
                                                              "freed"};
  for (std::size_t i = 0; i < cache::kDropReasons; ++i) {
    visitor.Add(metrics::kPrefixesDroppedTotal, figures.dropped[i], kReasons[i]);
  }
}

void NodeCollector::Collect(metrics::Visitor& visitor) const {
  CollectState(visitor);
  CollectMemory(visitor);
  CollectJobs(visitor);
  CollectCompaction(visitor);
  CollectPressure(visitor);
  const std::string& device = services_.device->description().name;
  for (const std::unique_ptr<cache::Tenant>& tenant : node_.tenants()) {
    visitor.Add(metrics::kPoolExtents, tenant->pool().extents(), device);
    CollectTenant(*tenant, visitor);
    CollectWork(*tenant, visitor);
    CollectPrefixes(*tenant, visitor);
  }
}

}  // namespace tessera::serving
