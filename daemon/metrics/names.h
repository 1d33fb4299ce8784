// Describes every metric. Dashboards and alerts use these names, so renaming one breaks them.
#pragma once

#include <vector>

#include "daemon/metrics/description.h"

namespace tessera::metrics {

// Gauges: state that a component reports when it is scraped (see Collector).

inline constexpr Description<3> kPoolBytes = {
    "tessera_pool_bytes",
    "Bytes of a tenant's pool on a device: used, free in its extents, and the limit.",
    Kind::kGauge,
    {"tenant", "device", "state"}};
inline constexpr std::string_view kPoolUsed = "used";  // values of the label "state"
inline constexpr std::string_view kPoolFree = "free";
inline constexpr std::string_view kPoolLimit = "limit";

inline constexpr Description<2> kPoolUsedBytes = {
    "tessera_pool_used_bytes",
    "Bytes used in a tenant's pools, by kind of content (the memory tag).",
    Kind::kGauge,
    {"tenant", "tag"}};
inline constexpr Description<2> kPoolExtents = {"tessera_pool_extents",
                                                "Extents currently held by a tenant's pool.",
                                                Kind::kGauge,
                                                {"tenant", "device"}};
inline constexpr Description<0> kSessions = {
    "tessera_sessions", "Sessions currently attached.", Kind::kGauge, {}};
inline constexpr Description<1> kSequences = {
    "tessera_sequences", "Sequences currently held.", Kind::kGauge, {"tenant"}};
inline constexpr Description<1> kDecodingSequences = {
    "tessera_decoding_sequences",
    "Sequences that currently have tail rings, because a worker decodes them.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<0> kEpochRetiredBytes = {
    "tessera_epoch_retired_bytes",
    "Bytes that are no longer used but not yet freed, because a reader may still use them.",
    Kind::kGauge,
    {}};
inline constexpr Description<1> kRawCopyBytes = {
    "tessera_raw_copy_bytes",
    "Bytes of raw copies in host memory: rows whose segment has no strategy of its own yet.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kObservationBytes = {
    "tessera_observation_bytes",
    "Bytes of observations for token policies that wait for a decision; they share the budget of "
    "raw copies.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kPrefixes = {
    "tessera_prefixes", "Prefixes currently published.", Kind::kGauge, {"tenant"}};
inline constexpr Description<1> kPrefixBytes = {
    "tessera_prefix_bytes",
    "Bytes of tiles held by published prefixes; tiles that two prefixes share count twice.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kPrefixWaits = {
    "tessera_prefix_waits",
    "Match calls currently waiting for a prefix that another session computes.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kHostTierBytes = {"tessera_host_tier_bytes",
                                                  "Bytes of offloaded sequences in the host tier.",
                                                  Kind::kGauge,
                                                  {"tenant"}};
inline constexpr Description<0> kHostTierLimitBytes = {
    "tessera_host_tier_limit_bytes",
    "Maximum bytes of the host tier, for all tenants; 0: offloading is turned off.",
    Kind::kGauge,
    {}};
inline constexpr Description<2> kBackgroundJobs = {
    "tessera_background_jobs",
    "Background jobs that are queued or running, by priority and state.",
    Kind::kGauge,
    {"priority", "state"}};
inline constexpr Description<3> kBuildInfo = {
    "tessera_build_info",
    "Always 1; the labels hold the version, the device and the kernels.",
    Kind::kGauge,
    {"version", "device", "isa"}};

// Counters and histograms: events, counted where they happen (see Metrics).

inline constexpr Description<0> kSessionsTotal = {
    "tessera_sessions_total", "Sessions attached since the start.", Kind::kCounter, {}};
inline constexpr Description<1> kSessionEndsTotal = {
    "tessera_session_ends_total", "Sessions ended, by reason.", Kind::kCounter, {"reason"}};
inline constexpr Description<1> kTokensAppendedTotal = {
    "tessera_tokens_appended_total",
    "Tokens committed to sequences, by transport: rpc, or tail (mapped memory).",
    Kind::kCounter,
    {"door"}};
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
inline constexpr Description<0> kTokenChoicesTotal = {
    "tessera_token_choices_total",
    "Decisions of token policies, counted per layer.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kShownBytesTotal = {
    "tessera_shown_bytes_total",
    "Bytes of queries and attention sums that workers sent for token policies (Observe).",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kPackedBytesTotal = {
    "tessera_packed_bytes_total",
    "Bytes of tiles encoded in another form: their size before and after.",
    Kind::kCounter,
    {"side"}};
inline constexpr Description<1> kBackgroundJobsTotal = {"tessera_background_jobs_total",
                                                        "Background jobs completed, by priority.",
                                                        Kind::kCounter,
                                                        {"priority"}};
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
inline constexpr Description<0> kStrategiesTotal = {
    "tessera_strategies_total", "Strategies computed from rows.", Kind::kCounter, {}};
inline constexpr Description<0> kRunsLeftPlainTotal = {
    "tessera_runs_left_plain_total",
    "Segments left dense, because no form was smaller or could store all their values.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kSegmentsLeftDenseTotal = {
    "tessera_segments_left_dense_total",
    "Times that an attempt to compress a lane left rows of it dense, by why.",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<0> kRawRowsDroppedTotal = {
    "tessera_raw_rows_dropped_total",
    "Entries that keep the previous strategy, because the raw-copy budget was spent.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSelectRequestsTotal = {
    "tessera_select_requests_total", "Select calls computed.", Kind::kCounter, {}};
inline constexpr Description<2> kPrefixMatchesTotal = {
    "tessera_prefix_matches_total",
    "Match calls, by how much of their token list was published: all, part or nothing.",
    Kind::kCounter,
    {"tenant", "outcome"}};
inline constexpr Description<2> kPrefixMatchTokensTotal = {
    "tessera_prefix_match_tokens_total",
    "Tokens that Match calls asked for, and tokens that they found.",
    Kind::kCounter,
    {"tenant", "side"}};
inline constexpr Description<2> kPrefixesPublishedTotal = {
    "tessera_prefixes_published_total",
    "Publish calls, by outcome: a new prefix, or one that was published already (known).",
    Kind::kCounter,
    {"tenant", "outcome"}};
inline constexpr Description<2> kPrefixesDroppedTotal = {
    "tessera_prefixes_dropped_total",
    "Prefixes removed, by reason: expired, least_recently_used or freed.",
    Kind::kCounter,
    {"tenant", "reason"}};
inline constexpr Description<0> kTailFullWaitsTotal = {
    "tessera_tail_full_waits_total",
    "Decode steps that had to wait because a tail ring was full.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSnapshotsPublishedTotal = {
    "tessera_snapshots_published_total", "Lane snapshots published.", Kind::kCounter, {}};
inline constexpr Description<0> kPinsRevokedTotal = {"tessera_pins_revoked_total",
                                                     "Overdue reader pins that the daemon revoked.",
                                                     Kind::kCounter,
                                                     {}};
inline constexpr Description<0> kSequencesFailedTotal = {
    "tessera_sequences_failed_total",
    "Sequences marked FAILED because a worker wrote unusable values.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kAttendRequestsTotal = {
    "tessera_attend_requests_total",
    "Attend calls computed by the daemon, by transport.",
    Kind::kCounter,
    {"door"}};
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
inline constexpr Description<2> kPressureClimbsTotal = {
    "tessera_pressure_climbs_total",
    "Attempts to reclaim memory, by rung of the reclaim ladder and outcome.",
    Kind::kCounter,
    {"rung", "outcome"}};
inline constexpr Description<1> kPressureStepsTotal = {
    "tessera_pressure_steps_total",
    "Reclaim steps, by rung: prefixes dropped, sequences offloaded, segments re-encoded smaller.",
    Kind::kCounter,
    {"rung"}};
inline constexpr Description<1> kPressureCallsTotal = {
    "tessera_pressure_calls_total",
    "Calls that found the pool full: served after memory was reclaimed, or refused.",
    Kind::kCounter,
    {"outcome"}};
inline constexpr Description<2> kRpcRequestsTotal = {"tessera_rpc_requests_total",
                                                     "RPCs completed, by method and status code.",
                                                     Kind::kCounter,
                                                     {"method", "code"}};
inline constexpr Description<1> kRpcDurationSeconds = {
    "tessera_rpc_duration_seconds",
    "Time from receiving an RPC to its answer, in seconds.",
    Kind::kHistogram,
    {"method"}};

// All of the above metrics, for tests and documentation.
std::vector<DescriptionView> AllMetrics();

}  // namespace tessera::metrics
