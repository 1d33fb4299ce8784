// Collector and Visitor: components report their state when it is scraped. Nothing is pushed, so no
// value can be stale.
//
//   class PoolMetrics : public Collector {
//     void Collect(Visitor& visitor) const override {
//       visitor.Add(kPoolReservedBytes, account_.used_bytes(), "cpu");
//     }
//   };
//   const Registration registration = metrics.Register(pool_metrics);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "daemon/metrics/description.h"

namespace tessera::metrics {

struct HistogramSample {
  struct Bucket {
    double upper_bound;              // inclusive; infinity in the last bucket
    std::uint64_t cumulative_count;  // observations at or below it
  };
  std::span<const Bucket> buckets;
  double sum;
};

// Receives the samples of one scrape. Samples of the same series (metric and labels) are summed.
// Label values must live for the duration of the call; descriptions must be constants.
class Visitor {
 public:
  // One value per label, in the order of the description.
  template <std::size_t N, typename T, typename... LabelValues>
  requires(std::is_arithmetic_v<T> &&
           sizeof...(LabelValues) == N) void Add(const Description<N>& description, T value,
                                                 const LabelValues&... labels) {
    const std::array<std::string_view, N> values = {std::string_view(labels)...};
    AddSample(description.view(), values, static_cast<double>(value));
  }

  virtual void AddSample(const DescriptionView& description,
                         std::span<const std::string_view> labels, double value) = 0;
  virtual void AddHistogram(const DescriptionView& description,
                            std::span<const std::string_view> labels,
                            const HistogramSample& sample) = 0;

 protected:
  ~Visitor() = default;
};

// Implemented by components that report state.
class Collector {
 public:
  // Called on the scraping thread, one scrape at a time, with the lock of Metrics held. It may take
  // the component's locks briefly, but must not register or unregister a collector.
  virtual void Collect(Visitor& visitor) const = 0;

 protected:
  ~Collector() = default;
};

}  // namespace tessera::metrics
