// Counters and histograms. An increment is one relaxed atomic addition without a look-up, because
// callers hold the counter itself.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "daemon/metrics/collector.h"
#include "daemon/metrics/description.h"

namespace tessera::metrics {

// A counter without labels. Thread-safe, like all classes here.
class Counter {
 public:
  explicit Counter(const Description<0>& description) : description_(description) {}
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;

  void Increment(std::uint64_t by = 1) { value_.fetch_add(by, std::memory_order_relaxed); }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

  void Visit(Visitor& visitor) const { visitor.Add(description_, value()); }

 private:
  const Description<0>& description_;
  std::atomic<std::uint64_t> value_{0};
};

// The label values of an enumeration, in the order of its enumerators:
//   template <> inline constexpr std::array kLabelValues<Transport> = {"rpc", "mapped"};
template <typename Enum>
inline constexpr std::array<std::string_view, 0> kLabelValues = {};

// A counter with one label whose values are an enumeration. Every value is reported, even if zero.
template <typename Enum>
class CounterBy {
 public:
  static constexpr std::size_t kValues = kLabelValues<Enum>.size();
  static_assert(kValues > 0, "the enumeration has no kLabelValues");

  explicit CounterBy(const Description<1>& description) : description_(description) {}
  CounterBy(const CounterBy&) = delete;
  CounterBy& operator=(const CounterBy&) = delete;

  void Increment(Enum label, std::uint64_t by = 1) {
    values_[static_cast<std::size_t>(label)].fetch_add(by, std::memory_order_relaxed);
  }
  std::uint64_t value(Enum label) const {
    return values_[static_cast<std::size_t>(label)].load(std::memory_order_relaxed);
  }

  void Visit(Visitor& visitor) const {
    for (std::size_t i = 0; i < kValues; ++i) {
      visitor.Add(description_, value(static_cast<Enum>(i)), kLabelValues<Enum>[i]);
    }
  }

 private:
  const Description<1>& description_;
  std::array<std::atomic<std::uint64_t>, kValues> values_{};
};

// Upper bounds of buckets; a further bucket takes longer durations.
inline constexpr std::array<std::chrono::nanoseconds, 8> kRpcBounds = {
    std::chrono::microseconds(50), std::chrono::microseconds(200), std::chrono::milliseconds(1),
    std::chrono::milliseconds(5),  std::chrono::milliseconds(25),  std::chrono::milliseconds(100),
    std::chrono::seconds(1),       std::chrono::seconds(10)};
// Moves of sequences, and waits for other workers.
inline constexpr std::array<std::chrono::nanoseconds, 6> kMoveBounds = {
    std::chrono::milliseconds(1),   std::chrono::milliseconds(5), std::chrono::milliseconds(25),
    std::chrono::milliseconds(100), std::chrono::seconds(1),      std::chrono::seconds(10)};

// Durations in fixed buckets.
class DurationHistogram {
 public:
  static constexpr std::size_t kMostBounds = 8;

  // `bounds` must be a constant with at most kMostBounds elements.
  explicit DurationHistogram(std::span<const std::chrono::nanoseconds> bounds) : bounds_(bounds) {}
  DurationHistogram(const DurationHistogram&) = delete;
  DurationHistogram& operator=(const DurationHistogram&) = delete;

  void Observe(std::chrono::nanoseconds duration);
  // Adds observations that another process counted: their number in bucket `bucket`, and the sum.
  void AddToBucket(std::size_t bucket, std::uint64_t observations);
  void AddToSum(std::chrono::nanoseconds sum);

  std::size_t buckets() const { return bounds_.size() + 1; }
  std::uint64_t count() const;
  void Visit(Visitor& visitor, const DescriptionView& description,
             std::span<const std::string_view> labels) const;

 private:
  const std::span<const std::chrono::nanoseconds> bounds_;
  std::array<std::atomic<std::uint64_t>, kMostBounds + 1> counts_{};
  std::atomic<std::int64_t> sum_nanoseconds_{0};
};

}  // namespace tessera::metrics
