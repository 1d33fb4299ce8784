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
//   template <> inline constexpr std::array kLabelValues<Transport> = {"rpc", "tail"};
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

// Durations in fixed buckets, from 50 microseconds (an empty RPC on a Unix socket) to 10 seconds.
class DurationHistogram {
 public:
  // Upper bounds in nanoseconds; an extra bucket takes longer durations.
  static constexpr std::array<std::int64_t, 17> kBounds = {
      50'000,      100'000,       250'000,       500'000,       1'000'000,     2'500'000,
      5'000'000,   10'000'000,    25'000'000,    50'000'000,    100'000'000,   250'000'000,
      500'000'000, 1'000'000'000, 2'500'000'000, 5'000'000'000, 10'000'000'000};

  void Observe(std::chrono::nanoseconds duration);
  void Visit(Visitor& visitor, const DescriptionView& description,
             std::span<const std::string_view> labels) const;

 private:
  std::array<std::atomic<std::uint64_t>, kBounds.size() + 1> counts_{};
  std::atomic<std::int64_t> sum_nanoseconds_{0};
};

}  // namespace tessera::metrics
