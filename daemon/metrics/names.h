// Describes every metric. Dashboards and alerts use these names, so renaming one breaks them.
// deploy/docs/metrics.md is generated from this list.
#pragma once

#include <vector>

#include "daemon/metrics/description.h"

namespace tessera::metrics {

// Gauges of a tenant. A tenant has 20 series, so a new one needs a reason (README.md).

inline constexpr Description<1> kTenantUsedBytes = {
    "tessera_tenant_used_bytes",
    "Bytes that count against a tenant's limits: its tiles, tails, staging arenas and everything "
    "else.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kTenantSoftLimitBytes = {
    "tessera_tenant_soft_limit_bytes",
    "Bytes above which a tenant's idle memory is reclaimed first; "
    "without a limit of its own, the pool's size.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kTenantHardLimitBytes = {
    "tessera_tenant_hard_limit_bytes",
    "Bytes above which a tenant's calls are refused; "
    "without a limit of its own, the pool's size.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<2> kTenantMemoryBytes = {
    "tessera_tenant_memory_bytes",
    "Bytes of tessera_tenant_used_bytes by content: tiles, tails, staging, snapshots or other.",
    Kind::kGauge,
    {"tenant", "tag"}};
inline constexpr Description<2> kSequences = {
    "tessera_sequences",
    "Sequences, by state: held in the pool, decoding (with a tail ring), or offloaded.",
    Kind::kGauge,
    {"tenant", "state"}};
inline constexpr Description<1> kSequenceTokens = {
    "tessera_sequence_tokens",
    "Tokens of all sequences of a tenant; a token that two sequences share counts twice.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kPrefixes = {
    "tessera_prefixes", "Published prefixes.", Kind::kGauge, {"tenant"}};
inline constexpr Description<1> kPrefixBytes = {
    "tessera_prefix_bytes",
    "Bytes of tiles held by published prefixes; tiles that two prefixes share count twice.",
    Kind::kGauge,
    {"tenant"}};

// Counters of a tenant.

inline constexpr Description<2> kMemoryRefusalsTotal = {
    "tessera_memory_refusals_total",
    "Calls refused for lack of pool memory, by what was full: the tenant's quota or the node.",
    Kind::kCounter,
    {"tenant", "cause"}};
inline constexpr Description<1> kSequencesFailedTotal = {
    "tessera_sequences_failed_total",
    "Sequences marked as failed, because a worker wrote unusable values.",
    Kind::kCounter,
    {"tenant"}};
inline constexpr Description<1> kPinsRevokedTotal = {"tessera_pins_revoked_total",
                                                     "Overdue reader pins that the daemon revoked.",
                                                     Kind::kCounter,
                                                     {"tenant"}};
inline constexpr Description<2> kPrefixMatchTokensTotal = {
    "tessera_prefix_match_tokens_total",
    "Tokens that Match calls asked for, and tokens that they found.",
    Kind::kCounter,
    {"tenant", "side"}};

// Gauges of the node.

inline constexpr Description<3> kBuildInfo = {
    "tessera_build_info",
    "Always 1; the labels hold the version, the device and the kernels.",
    Kind::kGauge,
    {"version", "device", "isa"}};
inline constexpr Description<0> kConfigLastReloadSuccessful = {
    "tessera_config_last_reload_successful",
    "1 if the last reload of the configuration succeeded, or if there was none; else 0.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kConfigLastReloadSuccessTimestampSeconds = {
    "tessera_config_last_reload_success_timestamp_seconds",
    "When the configuration was last loaded with success, in seconds since 1970.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kReady = {
    "tessera_ready", "1 while the daemon accepts sessions, else 0.", Kind::kGauge, {}};
inline constexpr Description<0> kDraining = {
    "tessera_draining", "1 from the start of a drain on, else 0.", Kind::kGauge, {}};
inline constexpr Description<1> kDeviceHealthy = {
    "tessera_device_healthy",
    "1 while the device works; 0 after a failure, which only a restart clears.",
    Kind::kGauge,
    {"device"}};
inline constexpr Description<0> kSessions = {
    "tessera_sessions", "Sessions currently attached.", Kind::kGauge, {}};
inline constexpr Description<1> kPoolReservedBytes = {
    "tessera_pool_reserved_bytes",
    "Physical memory of all tenants, in whole extents; used and free parts of them.",
    Kind::kGauge,
    {"device"}};
inline constexpr Description<1> kPoolLimitBytes = {
    "tessera_pool_limit_bytes",
    "Maximum of tessera_pool_reserved_bytes (pool_bytes).",
    Kind::kGauge,
    {"device"}};
inline constexpr Description<1> kPoolExtents = {
    "tessera_pool_extents",
    "Extents that the tenants' pools hold; directories, tails and staging arenas are not counted.",
    Kind::kGauge,
    {"device"}};
inline constexpr Description<0> kEpochRetiredBytes = {
    "tessera_epoch_retired_bytes",
    "Bytes that are no longer used but not yet freed, because a reader may still use them.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kRawCopyBytes = {
    "tessera_raw_copy_bytes",
    "Bytes of raw copies in host memory: rows whose segment has no strategy of its own yet.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kRawCopyLimitBytes = {
    "tessera_raw_copy_limit_bytes",
    "Maximum bytes of raw copies and observations together (raw_copy_bytes).",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kObservationBytes = {
    "tessera_observation_bytes",
    "Bytes of observations for token policies that wait for a decision.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kPrefixWaits = {
    "tessera_prefix_waits",
    "Match calls that wait for a prefix that another session computes.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kHostTierLimitBytes = {
    "tessera_host_tier_limit_bytes",
    "Maximum bytes of the host tier, for all tenants; 0: offloading is turned off.",
    Kind::kGauge,
    {}};
inline constexpr Description<1> kTierBytes = {
    "tessera_tier_bytes", "Bytes of offloaded sequences in a tier.", Kind::kGauge, {"tier"}};
inline constexpr Description<2> kBackgroundJobs = {
    "tessera_background_jobs",
    "Background jobs that are queued or running, by priority and state.",
    Kind::kGauge,
    {"priority", "state"}};
inline constexpr Description<1> kBackgroundOldestJobSeconds = {
    "tessera_background_oldest_job_seconds",
    "Time since the oldest queued or running job was submitted, in seconds; 0: there is none.",
    Kind::kGauge,
    {"priority"}};
inline constexpr Description<0> kTlsCertificateExpiry = {
    "tessera_tls_certificate_expiry_timestamp_seconds",
    "End of validity of the daemon's certificate, in seconds since 1970; absent without TLS.",
    Kind::kGauge,
    {}};

inline constexpr Description<0> kKvEventsWaiting = {
    "tessera_kv_events_waiting",
    "Blocks whose events wait to be published; absent unless kv_events is set, as all about "
    "events.",
    Kind::kGauge,
    {}};

// Counters of the node.

inline constexpr Description<1> kKvEventsTotal = {
    "tessera_kv_events_total",
    "Blocks of prefixes told to routers, once for each worker that finds them: stored, removed; "
    "and how often a worker's were cleared.",
    Kind::kCounter,
    {"type"}};
inline constexpr Description<0> kKvEventsDroppedTotal = {
    "tessera_kv_events_dropped_total",
    "Blocks whose events found the queue full. What their workers find is told anew.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kKvEventReplaysTotal = {
    "tessera_kv_event_replays_total",
    "Replays of KV events that subscribers asked for.",
    Kind::kCounter,
    {}};

inline constexpr Description<0> kLogDroppedTotal = {
    "tessera_log_dropped_total",
    "Log lines dropped, because nobody read the log fast enough.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSessionsTotal = {
    "tessera_sessions_total", "Sessions attached since the start.", Kind::kCounter, {}};
inline constexpr Description<1> kConnectionsRefusedTotal = {
    "tessera_connections_refused_total",
    "Connections that were refused or cut: of a user that may not connect (peer), beyond a limit "
    "(limit), without a token or session key in time (unknown), or against the rules of what a "
    "peer may send (protocol).",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<1> kAttachRefusedTotal = {
    "tessera_attach_refused_total",
    "Sessions refused: for a wrong token (token), beyond a limit (limit), by a daemon that drains "
    "or "
    "has lost its device (draining), for a version that does not fit (version), or for what Hello "
    "says (hello).",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<1> kSessionEndsTotal = {
    "tessera_session_ends_total", "Sessions ended, by reason.", Kind::kCounter, {"reason"}};
inline constexpr Description<1> kTokensCommittedTotal = {
    "tessera_tokens_committed_total",
    "Tokens committed to sequences, by transport: rpc (Append) or mapped (tail rings).",
    Kind::kCounter,
    {"transport"}};
inline constexpr Description<0> kAttendRequestsTotal = {
    "tessera_attend_requests_total",
    "Attend calls computed by the daemon; workers with mapped memory attend without a call.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSelectRequestsTotal = {
    "tessera_select_requests_total", "Select calls computed.", Kind::kCounter, {}};
inline constexpr Description<0> kTilesEncodedTotal = {
    "tessera_tiles_encoded_total", "Tiles encoded into segments.", Kind::kCounter, {}};
inline constexpr Description<0> kEntriesPackedTotal = {
    "tessera_entries_packed_total",
    "Entries encoded in another form; an entry counts each time.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kEntriesDroppedTotal = {
    "tessera_entries_dropped_total",
    "Entries that token policies removed from lanes or merged with others.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kPackedBytesTotal = {
    "tessera_packed_bytes_total",
    "Bytes of tiles encoded in another form: their size before and after.",
    Kind::kCounter,
    {"side"}};
inline constexpr Description<2> kPolicyBytesTotal = {
    "tessera_policy_bytes_total",
    "Bytes of tiles that a policy replaced, and of those it put in their place; the difference was "
    "freed.",
    Kind::kCounter,
    {"policy", "side"}};
inline constexpr Description<0> kProvisionalTilesTotal = {
    "tessera_provisional_tiles_total",
    "Tiles encoded provisionally, with the previous segment's strategy.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSegmentsSealedTotal = {
    "tessera_segments_sealed_total",
    "Segments sealed with their final encoding.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSegmentsStoredDenseTotal = {
    "tessera_segments_stored_dense_total",
    "Segments stored uncompressed, because no form was smaller or could store all their values.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kSegmentsLeftDenseTotal = {
    "tessera_segments_left_dense_total",
    "Attempts to compress a lane that left rows of it dense, by reason.",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<0> kStrategiesTotal = {
    "tessera_strategies_total", "Strategies computed from rows.", Kind::kCounter, {}};
inline constexpr Description<0> kTokenChoicesTotal = {
    "tessera_token_choices_total",
    "Decisions of token policies, counted per layer.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kTokenChoiceSecondsTotal = {
    "tessera_token_choice_seconds_total",
    "Time spent on the decisions of token policies, in seconds.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kObservedBytesTotal = {
    "tessera_observed_bytes_total",
    "Bytes of queries and attention sums that workers sent for token policies (Observe).",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kRawRowsDroppedTotal = {
    "tessera_raw_rows_dropped_total",
    "Entries that keep the previous strategy, because the raw-copy budget was spent.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kBackgroundJobsTotal = {"tessera_background_jobs_total",
                                                        "Background jobs completed, by priority.",
                                                        Kind::kCounter,
                                                        {"priority"}};
inline constexpr Description<1> kPrefixMatchesTotal = {
    "tessera_prefix_matches_total",
    "Match calls, by how much of their token list was published: all, part or nothing.",
    Kind::kCounter,
    {"outcome"}};
inline constexpr Description<1> kPrefixesPublishedTotal = {
    "tessera_prefixes_published_total",
    "Publish calls, by outcome: a new prefix, or one that was published already (known).",
    Kind::kCounter,
    {"outcome"}};
inline constexpr Description<1> kPrefixesDroppedTotal = {
    "tessera_prefixes_dropped_total",
    "Prefixes removed, by reason: expired, least_recently_used or freed.",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<0> kTailFullWaitsTotal = {
    "tessera_tail_full_waits_total",
    "Decode steps that had to wait because a tail ring was full.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSnapshotsPublishedTotal = {
    "tessera_snapshots_published_total", "Lane snapshots published.", Kind::kCounter, {}};
inline constexpr Description<1> kMovesTotal = {
    "tessera_moves_total",
    "Sequences moved between pool and host tier, by direction: offload or restore.",
    Kind::kCounter,
    {"direction"}};
inline constexpr Description<1> kMovedBytesTotal = {
    "tessera_moved_bytes_total",
    "Pool bytes freed by offloading or allocated by restoring, by direction.",
    Kind::kCounter,
    {"direction"}};
inline constexpr Description<1> kTierErrorsTotal = {
    "tessera_tier_errors_total",
    "Transfers to or from a tier that failed; an offload that finds the tier full counts.",
    Kind::kCounter,
    {"tier"}};
inline constexpr Description<2> kPressureClimbsTotal = {
    "tessera_pressure_climbs_total",
    "Attempts to reclaim memory, by rung of the reclaim ladder and outcome.",
    Kind::kCounter,
    {"rung", "outcome"}};
inline constexpr Description<1> kPressureStepsTotal = {
    "tessera_pressure_steps_total",
    "Reclaim steps, by rung: prefixes and sequences offloaded, prefixes dropped, segments "
    "re-encoded smaller.",
    Kind::kCounter,
    {"rung"}};
inline constexpr Description<3> kRpcRequestsTotal = {
    "tessera_rpc_requests_total",
    "RPCs completed, by method and status code; Attach counts the answers to Hello.",
    Kind::kCounter,
    {"service", "method", "code"}};
inline constexpr Description<2> kRpcSecondsTotal = {
    "tessera_rpc_seconds_total",
    "Time from receiving RPCs to their answers, in seconds.",
    Kind::kCounter,
    {"service", "method"}};

// Histograms.

inline constexpr Description<2> kRpcDurationSeconds = {
    "tessera_rpc_duration_seconds",
    "Time from receiving an RPC to its answer, in seconds, by class: hot calls are short, bulk "
    "calls move rows or wait, admin calls are the operator's.",
    Kind::kHistogram,
    {"service", "class"}};
inline constexpr Description<0> kDecodeWaitSeconds = {
    "tessera_decode_wait_seconds",
    "Time that a decode step over mapped memory waited for ring space, in seconds; most wait 0.",
    Kind::kHistogram,
    {}};
inline constexpr Description<0> kRestoreSeconds = {
    "tessera_restore_seconds",
    "Time to move an offloaded sequence back into the pool, in seconds.",
    Kind::kHistogram,
    {}};
inline constexpr Description<0> kMatchWaitSeconds = {
    "tessera_match_wait_seconds",
    "Time that Match calls waited for a prefix that another session computes, in seconds.",
    Kind::kHistogram,
    {}};
inline constexpr Description<1> kTierSeconds = {
    "tessera_tier_seconds",
    "Time of one transfer of a sequence to or from a tier, in seconds.",
    Kind::kHistogram,
    {"tier"}};

// The process. Prometheus's own names, which are the same for every program.

inline constexpr Description<0> kProcessStartTimeSeconds = {
    "process_start_time_seconds", "Start of the process, in seconds since 1970.", Kind::kGauge, {}};
inline constexpr Description<0> kProcessCpuSecondsTotal = {
    "process_cpu_seconds_total",
    "CPU time of the process in user and system mode, in seconds.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kProcessResidentMemoryBytes = {
    "process_resident_memory_bytes", "Resident memory of the process, in bytes.", Kind::kGauge, {}};
inline constexpr Description<0> kMemoryHeadroomBytes = {
    "tessera_memory_headroom_bytes",
    "Resident memory of the process that is left below the limit of the machine and its cgroups, "
    "in bytes. At 0 the kernel kills the daemon.",
    Kind::kGauge,
    {}};
inline constexpr Description<0> kProcessOpenFds = {
    "process_open_fds", "Open file descriptors of the process.", Kind::kGauge, {}};
inline constexpr Description<0> kProcessMaxFds = {
    "process_max_fds", "Maximum number of open file descriptors.", Kind::kGauge, {}};

// All of the above metrics, for tests and documentation.
std::vector<DescriptionView> AllMetrics();

}  // namespace tessera::metrics
