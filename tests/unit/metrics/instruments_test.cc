#include "daemon/metrics/instruments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/metrics/metrics.h"
#include "tests/fakes/seed.h"

namespace tessera::metrics {
namespace {

using std::chrono::nanoseconds;

struct KeepHistogram final : Visitor {
  void AddSample(const DescriptionView&, std::span<const std::string_view>, double) override {}
  void AddHistogram(const DescriptionView&, std::span<const std::string_view>,
                    const HistogramSample& sample) override {
    buckets.assign(sample.buckets.begin(), sample.buckets.end());
    sum = sample.sum;
  }
  std::vector<HistogramSample::Bucket> buckets;
  double sum = 0;
};

TEST(Counter, LosesNothingBetweenThreads) {
  Counter counter(kTilesEncodedTotal);
  CounterBy<SessionEnd> by_reason(kSessionEndsTotal);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) {
        counter.Increment();
        by_reason.Increment(i % 2 == 0 ? SessionEnd::kClosed : SessionEnd::kLost, 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter.value(), 40000u);
  EXPECT_EQ(by_reason.value(SessionEnd::kClosed), 60000u);
  EXPECT_EQ(by_reason.value(SessionEnd::kLost), 60000u);
}

// Compared with counting the observations one by one.
TEST(DurationHistogram, BucketsAreCumulativeAndInclusive) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  DurationHistogram histogram(kRpcBounds);
  std::vector<std::int64_t> observed;
  for (const nanoseconds bound : kRpcBounds) observed.push_back(bound.count());
  for (int i = 0; i < 1000; ++i)
    observed.push_back(static_cast<std::int64_t>(random() >> (random() % 40 + 24)));
  double sum = 0;
  for (const std::int64_t value : observed) {
    histogram.Observe(nanoseconds(value));
    sum += static_cast<double>(value) / 1e9;
  }
  KeepHistogram kept;
  histogram.Visit(kept, kRpcDurationSeconds.view(), {});
  ASSERT_EQ(kept.buckets.size(), kRpcBounds.size() + 1);
  for (const auto& bucket : kept.buckets) {
    const auto expected = std::count_if(observed.begin(), observed.end(), [&](std::int64_t value) {
      return static_cast<double>(value) / 1e9 <= bucket.upper_bound;
    });
    EXPECT_EQ(bucket.cumulative_count, static_cast<std::uint64_t>(expected)) << bucket.upper_bound;
  }
  EXPECT_TRUE(std::isinf(kept.buckets.back().upper_bound));
  EXPECT_NEAR(kept.sum, sum, 1e-9 * sum);
}

TEST(DurationHistogram, AClockThatWentBackCountsAsNoTime) {
  DurationHistogram histogram(kMoveBounds);
  histogram.Observe(nanoseconds(-5));
  KeepHistogram kept;
  histogram.Visit(kept, kRpcDurationSeconds.view(), {});
  EXPECT_EQ(kept.buckets.size(), kMoveBounds.size() + 1);
  EXPECT_EQ(kept.buckets.front().cumulative_count, 1u);
  EXPECT_EQ(kept.sum, 0);
}

TEST(DurationHistogram, TakesWhatAnotherProcessCounted) {
  DurationHistogram histogram(kMoveBounds);
  histogram.AddToBucket(2, 5);
  histogram.AddToSum(std::chrono::milliseconds(30));
  EXPECT_EQ(histogram.count(), 5u);
  KeepHistogram kept;
  histogram.Visit(kept, kRestoreSeconds.view(), {});
  EXPECT_EQ(kept.buckets[1].cumulative_count, 0u);
  EXPECT_EQ(kept.buckets[2].cumulative_count, 5u);
  EXPECT_DOUBLE_EQ(kept.sum, 0.03);
}

}  // namespace
}  // namespace tessera::metrics
