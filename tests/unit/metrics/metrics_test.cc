#include "daemon/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/metrics/process.h"

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

// Each counter that is counted where it happens moves by its own means, and no other one does. What
// components report is driven in tests/e2e/metrics.
TEST(Metrics, EachMovesByItsOwnMeansAndNoOther) {
  Metrics metrics({.version = "1", .device = "cpu", .isa = "avx2"});
  RpcMethod& append = metrics.AddRpc("Tessera", "Append", RpcClass::kBulk);
  using Names = std::set<std::string>;
  const std::pair<std::function<void()>, Names> drives[] = {
      {[&] { metrics.sessions_total.Increment(); }, {"tessera_sessions_total"}},
      {[&] { metrics.session_ends_total.Increment(SessionEnd::kLost); },
       {"tessera_session_ends_total"}},
      {[&] { append.Finished(absl::StatusCode::kOk, std::chrono::milliseconds(1)); },
       {"tessera_rpc_requests_total", "tessera_rpc_seconds_total", "tessera_rpc_duration_seconds"}},
  };
  for (const auto& [drive, names] : drives) {
    const Samples before(metrics);
    drive();
    const Samples after(metrics);
    Names moved;
    for (const auto& [name, total] : after.total) {
      if (total != before.total.at(name)) moved.insert(name);
    }
    EXPECT_EQ(moved, names);
  }
}

TEST(Metrics, RpcCodesAreCountedApart) {
  Metrics metrics({});
  RpcMethod& method = metrics.AddRpc("Tessera", "Fork", RpcClass::kHot);
  EXPECT_EQ(&method, &metrics.AddRpc("Tessera", "Fork", RpcClass::kHot));
  EXPECT_EQ(&method, &metrics.Rpc("Tessera", "Fork"));
  EXPECT_NE(&method, &metrics.AddRpc("Tessera", "Free", RpcClass::kHot));
  EXPECT_NE(&method, &metrics.AddRpc("TesseraAdmin", "Fork", RpcClass::kAdmin));
  method.Finished(absl::StatusCode::kNotFound, std::chrono::microseconds(10));
  method.Finished(absl::StatusCode::kNotFound, std::chrono::microseconds(10));
  method.Finished(absl::StatusCode::kUnauthenticated, std::chrono::microseconds(10));
  method.Finished(static_cast<absl::StatusCode>(99), std::chrono::microseconds(10));
  const Samples samples(metrics);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Tessera,Fork,OK}"), 0);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Tessera,Fork,NOT_FOUND}"), 2);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Tessera,Fork,UNAUTHENTICATED}"), 1);
  EXPECT_EQ(samples.series.at("tessera_rpc_requests_total{Tessera,Fork,UNKNOWN}"), 1);
  EXPECT_FALSE(samples.series.contains("tessera_rpc_requests_total{Tessera,Fork,ABORTED}"));
  EXPECT_DOUBLE_EQ(samples.series.at("tessera_rpc_seconds_total{Tessera,Fork}"), 40e-6);
  EXPECT_EQ(samples.series.at("tessera_rpc_duration_seconds{Tessera,hot}"), 4);
  EXPECT_EQ(samples.series.at("tessera_rpc_duration_seconds{TesseraAdmin,admin}"), 0);
}

// The process's figures: the start is in the past, and an open file counts.
TEST(Process, ReportsItself) {
  Metrics metrics({});
  const ProcessMetrics process;
  const auto registration = metrics.Register(process);
  const Samples before(metrics);
  const auto now = static_cast<double>(std::time(nullptr));
  EXPECT_LE(before.total.at("process_start_time_seconds"), now + 1);
  EXPECT_GT(before.total.at("process_start_time_seconds"), now - 3600);
  EXPECT_GT(before.total.at("process_resident_memory_bytes"), 1 << 20);
  EXPECT_GT(before.total.at("process_max_fds"), before.total.at("process_open_fds"));
  EXPECT_GE(before.total.at("process_cpu_seconds_total"), 0);
  const std::ifstream open("/proc/self/stat");
  const Samples after(metrics);
  EXPECT_EQ(after.total.at("process_open_fds"), before.total.at("process_open_fds") + 1);
  EXPECT_FALSE(after.total.contains("tessera_memory_headroom_bytes"));
}

TEST(Process, TheHeadroomIsWhatTheLimitLeaves) {
  constexpr double kLimit = 1e12;
  Metrics metrics({});
  const ProcessMetrics process(static_cast<std::uint64_t>(kLimit));
  const auto registration = metrics.Register(process);
  const Samples samples(metrics);
  EXPECT_EQ(samples.total.at("tessera_memory_headroom_bytes"),
            kLimit - samples.total.at("process_resident_memory_bytes"));
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
