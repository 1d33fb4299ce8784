#include "daemon/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::metrics {
namespace {

// The sum of all series of each metric, and each series as "name{value,value}".
struct Samples final : Visitor {
  explicit Samples(const Metrics& metrics) { metrics.Visit(*this); }

  void AddSample(const DescriptionView& description, std::span<const std::string_view> labels,
                 double value) override {
    Add(description, labels, value);
  }
  void AddHistogram(const DescriptionView& description, std::span<const std::string_view> labels,
                    const HistogramSample& sample) override {
    Add(description, labels, static_cast<double>(sample.buckets.back().cumulative_count));
  }
  void Add(const DescriptionView& description, std::span<const std::string_view> labels,
           double value) {
    std::string key(description.name);
    for (std::size_t i = 0; i < labels.size(); ++i) Append(key, i == 0 ? "{" : ",", labels[i]);
    if (!labels.empty()) key += '}';
    series[key] += value;
    total[std::string(description.name)] += value;
  }
  std::map<std::string, double> series;
  std::map<std::string, double> total;
};

struct FakeComponent final : Collector {
  void Collect(Visitor& visitor) const override { collect(visitor); }
  std::function<void(Visitor&)> collect;
};

TEST(Metrics, CountersStartAtZeroWithEveryLabel) {
  const Metrics metrics({.version = "1", .device = "cpu", .isa = "avx2"});
  const Samples samples(metrics);
  for (const char* series : {"tessera_sessions_total", "tessera_session_ends_total{lost}",
                             "tessera_session_ends_total{drained}"}) {
    ASSERT_TRUE(samples.series.contains(series)) << series;
    EXPECT_EQ(samples.series.at(series), 0) << series;
  }
  EXPECT_EQ(samples.series.at("tessera_build_info{1,cpu,avx2}"), 1);
}

// Moves each metric by the daemon's own means, and checks that no other metric moves.
TEST(Metrics, EachMovesByItsOwnMeansAndNoOther) {
  Metrics metrics({.version = "1", .device = "cpu", .isa = "avx2"});
  FakeComponent component;
  double state = 0;
  component.collect = [&state](Visitor& visitor) {
    visitor.Add(kPoolBytes, state, "default", "cpu", kPoolUsed);
    visitor.Add(kPoolUsedBytes, state, "default", "tiles");
    visitor.Add(kPoolExtents, state, "default", "cpu");
    visitor.Add(kSessions, state);
    visitor.Add(kSequences, state, "default");
    visitor.Add(kDecodingSequences, state, "default");
    visitor.Add(kEpochRetiredBytes, state);
    visitor.Add(kRawCopyBytes, state, "default");
    visitor.Add(kObservationBytes, state, "default");
    visitor.Add(kPrefixes, state, "default");
    visitor.Add(kPrefixBytes, state, "default");
    visitor.Add(kPrefixWaits, state, "default");
    visitor.Add(kPrefixMatchesTotal, state, "default", "all");
    visitor.Add(kPrefixMatchTokensTotal, state, "default", "asked");
    visitor.Add(kPrefixesPublishedTotal, state, "default", "new");
    visitor.Add(kPrefixesDroppedTotal, state, "default", "freed");
    visitor.Add(kHostTierBytes, state, "default");
    visitor.Add(kHostTierLimitBytes, state);
    visitor.Add(kMovesTotal, state, "offload");
    visitor.Add(kMovedBytesTotal, state, "restore");
    visitor.Add(kPressureClimbsTotal, state, "offload", "some");
    visitor.Add(kPressureStepsTotal, state, "offload");
    visitor.Add(kPressureCallsTotal, state, "served");
    visitor.Add(kBackgroundJobs, state, "tails", "queued");
    visitor.Add(kBackgroundJobsTotal, state, "tails");
    visitor.Add(kProvisionalTilesTotal, state);
    visitor.Add(kSegmentsSealedTotal, state);
    visitor.Add(kStrategiesTotal, state);
    visitor.Add(kRunsLeftPlainTotal, state);
    visitor.Add(kSegmentsLeftDenseTotal, state, "loss_above_limit");
    visitor.Add(kRawRowsDroppedTotal, state);
    visitor.Add(kTokensAppendedTotal, state, "rpc");
    visitor.Add(kTilesEncodedTotal, state);
    visitor.Add(kEntriesPackedTotal, state);
    visitor.Add(kEntriesDroppedTotal, state);
    visitor.Add(kTokenChoicesTotal, state);
    visitor.Add(kShownBytesTotal, state);
    visitor.Add(kPackedBytesTotal, state, "before");
    visitor.Add(kSelectRequestsTotal, state);
    visitor.Add(kTailFullWaitsTotal, state);
    visitor.Add(kSnapshotsPublishedTotal, state);
    visitor.Add(kPinsRevokedTotal, state);
    visitor.Add(kSequencesFailedTotal, state);
    visitor.Add(kAttendRequestsTotal, state, "rpc");
  };
  const auto registration = metrics.Register(component);
  RpcMethod& append = metrics.Rpc("Append");

  using Names = std::set<std::string>;
  const std::pair<std::function<void()>, Names> drives[] = {
      {[&] { metrics.sessions_total.Increment(); }, {"tessera_sessions_total"}},
      {[&] { metrics.session_ends_total.Increment(SessionEnd::kLost); },
       {"tessera_session_ends_total"}},
      {[&] { append.Finished(absl::StatusCode::kOk, std::chrono::milliseconds(1)); },
       {"tessera_rpc_requests_total", "tessera_rpc_duration_seconds"}},
      {[&] { state = 5; },
       {"tessera_pool_bytes",
        "tessera_pool_used_bytes",
        "tessera_pool_extents",
        "tessera_sessions",
        "tessera_sequences",
        "tessera_decoding_sequences",
        "tessera_epoch_retired_bytes",
        "tessera_raw_copy_bytes",
        "tessera_observation_bytes",
        "tessera_prefixes",
        "tessera_prefix_bytes",
        "tessera_prefix_waits",
        "tessera_prefix_matches_total",
        "tessera_prefix_match_tokens_total",
        "tessera_prefixes_published_total",
        "tessera_prefixes_dropped_total",
        "tessera_host_tier_bytes",
        "tessera_host_tier_limit_bytes",
        "tessera_moves_total",
        "tessera_moved_bytes_total",
        "tessera_pressure_climbs_total",
        "tessera_pressure_steps_total",
        "tessera_pressure_calls_total",
        "tessera_background_jobs",
        "tessera_background_jobs_total",
        "tessera_provisional_tiles_total",
        "tessera_segments_sealed_total",
        "tessera_strategies_total",
        "tessera_runs_left_plain_total",
        "tessera_segments_left_dense_total",
        "tessera_raw_rows_dropped_total",
        "tessera_tokens_appended_total",
        "tessera_tiles_encoded_total",
        "tessera_entries_packed_total",
        "tessera_entries_dropped_total",
        "tessera_token_choices_total",
        "tessera_shown_bytes_total",
        "tessera_packed_bytes_total",
        "tessera_select_requests_total",
        "tessera_tail_full_waits_total",
        "tessera_snapshots_published_total",
        "tessera_pins_revoked_total",
        "tessera_sequences_failed_total",
        "tessera_attend_requests_total"}},
  };
  Names driven = {"tessera_build_info"};  // constant
  for (const auto& [drive, names] : drives) {
    const Samples before(metrics);
    drive();
    const Samples after(metrics);
    Names moved;
    for (const auto& [name, total] : after.total) {
      if (total != before.total.at(name)) moved.insert(name);
    }
    EXPECT_EQ(moved, names);
    driven.insert(names.begin(), names.end());
  }
  for (const DescriptionView& metric : AllMetrics()) {
    EXPECT_TRUE(driven.contains(std::string(metric.name))) << metric.name << " is never driven";
  }
}

TEST(Metrics, RpcCodesAreCountedApart) {
  Metrics metrics({});
  RpcMethod& method = metrics.Rpc("Fork");
  EXPECT_EQ(&method, &metrics.Rpc("Fork"));
  EXPECT_NE(&method, &metrics.Rpc("Free"));
  method.Finished(absl::StatusCode::kNotFound, std::chrono::microseconds(10));
  method.Finished(absl::StatusCode::kNotFound, std::chrono::microseconds(10));
  method.Finished(absl::StatusCode::kUnauthenticated, std::chrono::microseconds(10));
  method.Finished(static_cast<absl::StatusCode>(99), std::chrono::microseconds(10));
  const Samples samples(metrics);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Fork,OK}"), 0);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Fork,NOT_FOUND}"), 2);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Fork,UNAUTHENTICATED}"), 1);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Fork,UNKNOWN}"), 1);
  EXPECT_FALSE(samples.series.contains("tessera_rpc_requests_total{Fork,ABORTED}"));
  EXPECT_EQ(samples.series.at("tessera_rpc_duration_seconds{Fork}"), 4);
}

TEST(Metrics, ACollectorIsAskedUntilItsRegistrationEnds) {
  Metrics metrics({});
  FakeComponent component;
  int asked = 0;
  component.collect = [&asked](Visitor&) { ++asked; };
  {
    Metrics::Registration moved;
    {
      Metrics::Registration registration = metrics.Register(component);
      moved = std::move(registration);
    }
    Samples first(metrics);
    EXPECT_EQ(asked, 1);
  }
  Samples second(metrics);
  EXPECT_EQ(asked, 1);
}

// Components come and go during scrapes; none is called after its end.
TEST(Metrics, RegistrationsEndSafelyUnderScrapes) {
  Metrics metrics({});
  std::atomic<bool> done{false};
  std::thread scraper([&] {
    while (!done) Samples{metrics};
  });
  for (int i = 0; i < 2000; ++i) {
    auto component = std::make_unique<FakeComponent>();
    auto alive = std::make_unique<double>(1);
    component->collect = [value = alive.get()](Visitor& visitor) {
      visitor.Add(kSessions, *value);
    };
    Metrics::Registration registration = metrics.Register(*component);
    registration.Reset();
    alive.reset();
    component.reset();
  }
  done = true;
  scraper.join();
}

TEST(MetricsDeathTest, ACollectorThatOutlivesTheMetricsIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        FakeComponent component;
        auto metrics = std::make_unique<Metrics>(BuildInfo{});
        auto registration = metrics->Register(component);
        metrics.reset();
      },
      "1 collectors outlive the metrics");
}

}  // namespace
}  // namespace tessera::metrics
