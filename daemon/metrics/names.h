// Every metric there is. Dashboards and alerts use these names: renaming one breaks them.
#pragma once

#include <vector>

#include "daemon/metrics/description.h"

namespace tessera::metrics {

// Gauges: state that a component reports when scraped (see Collector).

inline constexpr Description<3> kPoolBytes = {
    "tessera_pool_bytes",
    "Bytes of a tenant's pool on a device: used by objects, free in it, and the limit.",
    Kind::kGauge,
    {"tenant", "device", "state"}};
inline constexpr std::string_view kPoolUsed = "used";  // values of the label "state"
inline constexpr std::string_view kPoolFree = "free";
inline constexpr std::string_view kPoolLimit = "limit";

inline constexpr Description<2> kPoolUsedBytes = {
    "tessera_pool_used_bytes",
    "Bytes of a tenant's pools by what they hold (the memory tag).",
    Kind::kGauge,
    {"tenant", "tag"}};
inline constexpr Description<2> kPoolExtents = {"tessera_pool_extents",
                                                "Extents that a tenant's pool has now.",
                                                Kind::kGauge,
                                                {"tenant", "device"}};
inline constexpr Description<0> kSessions = {
    "tessera_sessions", "Sessions attached now.", Kind::kGauge, {}};
inline constexpr Description<1> kSequences = {
    "tessera_sequences", "Sequences held now.", Kind::kGauge, {"tenant"}};
inline constexpr Description<1> kDecodingSequences = {
    "tessera_decoding_sequences",
    "Sequences that have a tail now, because a worker decodes them.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<0> kEpochRetiredBytes = {
    "tessera_epoch_retired_bytes",
    "Bytes retired and not yet freed, since a reader may still see them.",
    Kind::kGauge,
    {}};
inline constexpr Description<1> kRawCopyBytes = {
    "tessera_raw_copy_bytes",
    "Bytes of rows that wait for a strategy of their own, in host memory beside the pools.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kObservationBytes = {
    "tessera_observation_bytes",
    "Bytes that workers have shown for token policies, until they are decided by; of the same "
    "budget.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kPrefixes = {
    "tessera_prefixes", "Prefixes published now.", Kind::kGauge, {"tenant"}};
inline constexpr Description<1> kPrefixBytes = {
    "tessera_prefix_bytes",
    "Bytes of the tiles that published prefixes hold; what two of them share counts twice.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kPrefixWaits = {
    "tessera_prefix_waits",
    "Match calls that wait now for a head that another session computes.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<1> kHostTierBytes = {
    "tessera_host_tier_bytes",
    "Bytes of offloaded sequences in the host tier, beside the pools.",
    Kind::kGauge,
    {"tenant"}};
inline constexpr Description<0> kHostTierLimitBytes = {
    "tessera_host_tier_limit_bytes",
    "Bytes that the host tier may hold of all tenants; 0: it is turned off.",
    Kind::kGauge,
    {}};
inline constexpr Description<2> kBackgroundJobs = {"tessera_background_jobs",
                                                   "Background jobs now, by priority and state.",
                                                   Kind::kGauge,
                                                   {"priority", "state"}};
inline constexpr Description<3> kBuildInfo = {"tessera_build_info",
                                              "Always 1; the labels say what runs here.",
                                              Kind::kGauge,
                                              {"version", "device", "isa"}};

// Counters and histograms: events, counted where they happen (see Metrics).

inline constexpr Description<0> kSessionsTotal = {
    "tessera_sessions_total", "Sessions that attached.", Kind::kCounter, {}};
inline constexpr Description<1> kSessionEndsTotal = {
    "tessera_session_ends_total", "Sessions that ended, by why.", Kind::kCounter, {"reason"}};
inline constexpr Description<1> kTokensAppendedTotal = {
    "tessera_tokens_appended_total",
    "Tokens committed to sequences, by the door they came through.",
    Kind::kCounter,
    {"door"}};
inline constexpr Description<0> kTilesEncodedTotal = {
    "tessera_tiles_encoded_total", "Tiles encoded into segments.", Kind::kCounter, {}};
inline constexpr Description<0> kEntriesPackedTotal = {
    "tessera_entries_packed_total",
    "Entries of lanes encoded in another form, each time anew.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kEntriesDroppedTotal = {
    "tessera_entries_dropped_total",
    "Entries that token policies removed from lanes, or merged with others.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kTokenChoicesTotal = {
    "tessera_token_choices_total",
    "Times that a token policy chose among the entries of a layer.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kShownBytesTotal = {
    "tessera_shown_bytes_total",
    "Bytes of queries and sums of attention that workers have shown for token policies.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kPackedBytesTotal = {
    "tessera_packed_bytes_total",
    "Bytes of tiles that were encoded in another form: before, and after.",
    Kind::kCounter,
    {"side"}};
inline constexpr Description<1> kBackgroundJobsTotal = {"tessera_background_jobs_total",
                                                        "Background jobs done, by priority.",
                                                        Kind::kCounter,
                                                        {"priority"}};
inline constexpr Description<0> kProvisionalTilesTotal = {
    "tessera_provisional_tiles_total",
    "Tiles encoded with the strategy before, until their segment gets its own.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSegmentsSealedTotal = {
    "tessera_segments_sealed_total", "Segments encoded for good.", Kind::kCounter, {}};
inline constexpr Description<0> kStrategiesTotal = {
    "tessera_strategies_total", "Strategies made from rows.", Kind::kCounter, {}};
inline constexpr Description<0> kRunsLeftPlainTotal = {
    "tessera_runs_left_plain_total",
    "Runs left as they came: no form would be smaller, or could store one of their values.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kSegmentsLeftDenseTotal = {
    "tessera_segments_left_dense_total",
    "Times that an attempt to compress a lane left rows of it dense, by why.",
    Kind::kCounter,
    {"reason"}};
inline constexpr Description<0> kRawRowsDroppedTotal = {
    "tessera_raw_rows_dropped_total",
    "Entries that keep the strategy before, because the budget for raw copies was spent.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSelectRequestsTotal = {
    "tessera_select_requests_total", "Select calls that the daemon computed.", Kind::kCounter, {}};
inline constexpr Description<2> kPrefixMatchesTotal = {
    "tessera_prefix_matches_total",
    "Match calls by what they found of their token list: all, a part, or nothing.",
    Kind::kCounter,
    {"tenant", "outcome"}};
inline constexpr Description<2> kPrefixMatchTokensTotal = {
    "tessera_prefix_match_tokens_total",
    "Tokens that Match calls asked for, and those that they found published.",
    Kind::kCounter,
    {"tenant", "side"}};
inline constexpr Description<2> kPrefixesPublishedTotal = {
    "tessera_prefixes_published_total",
    "Publish calls that made a prefix findable, or found the head published already.",
    Kind::kCounter,
    {"tenant", "outcome"}};
inline constexpr Description<2> kPrefixesDroppedTotal = {
    "tessera_prefixes_dropped_total",
    "Prefixes that are not findable any more, by why.",
    Kind::kCounter,
    {"tenant", "reason"}};
inline constexpr Description<0> kTailFullWaitsTotal = {
    "tessera_tail_full_waits_total",
    "Times that decoding had to wait because a tail ring was full.",
    Kind::kCounter,
    {}};
inline constexpr Description<0> kSnapshotsPublishedTotal = {
    "tessera_snapshots_published_total", "Lane snapshots published.", Kind::kCounter, {}};
inline constexpr Description<0> kPinsRevokedTotal = {
    "tessera_pins_revoked_total", "Overdue pins taken from readers.", Kind::kCounter, {}};
inline constexpr Description<0> kSequencesFailedTotal = {
    "tessera_sequences_failed_total",
    "Sequences marked FAILED because of values that cannot be served.",
    Kind::kCounter,
    {}};
inline constexpr Description<1> kAttendRequestsTotal = {
    "tessera_attend_requests_total",
    "Attend calls that the daemon computed, by the door they came through.",
    Kind::kCounter,
    {"door"}};
inline constexpr Description<1> kMovesTotal = {
    "tessera_moves_total",
    "Sequences that left the pool for the host tier, or came back, by direction.",
    Kind::kCounter,
    {"direction"}};
inline constexpr Description<1> kMovedBytesTotal = {
    "tessera_moved_bytes_total",
    "Bytes of the pool that were given back by offloading, or taken again, by direction.",
    Kind::kCounter,
    {"direction"}};
inline constexpr Description<2> kPressureClimbsTotal = {
    "tessera_pressure_climbs_total",
    "Times that a rung of the ladder was asked for memory, by rung and whether it found enough.",
    Kind::kCounter,
    {"rung", "outcome"}};
inline constexpr Description<1> kPressureStepsTotal = {
    "tessera_pressure_steps_total",
    "Steps of the ladder, by rung: prefixes dropped, sequences offloaded, segments thinned.",
    Kind::kCounter,
    {"rung"}};
inline constexpr Description<1> kPressureCallsTotal = {
    "tessera_pressure_calls_total",
    "Calls that met a full pool: served after memory was found, or refused.",
    Kind::kCounter,
    {"outcome"}};
inline constexpr Description<2> kRpcRequestsTotal = {"tessera_rpc_requests_total",
                                                     "RPCs finished, by method and status code.",
                                                     Kind::kCounter,
                                                     {"method", "code"}};
inline constexpr Description<1> kRpcDurationSeconds = {
    "tessera_rpc_duration_seconds",
    "Time from receiving an RPC to its answer, in seconds.",
    Kind::kHistogram,
    {"method"}};

// All of the above, for tests and documentation.
std::vector<DescriptionView> AllMetrics();

}  // namespace tessera::metrics
