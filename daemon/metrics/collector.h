// Reporting state at the time of a scrape: nothing is pushed, so nothing can be stale or forgotten.
//
//   class PoolMetrics : public Collector {
//     void Collect(Visitor& visitor) const override {
//       visitor.Add(kPoolBytes, pool_.used_bytes(), tenant_, "cpu", kPoolUsed);
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
    double upper_bound;              // inclusive; the last is infinity
    std::uint64_t cumulative_count;  // observations at or below it
  };
  std::span<const Bucket> buckets;
  double sum;
};

// Receives the samples of one scrape. Two samples of one series (same metric, same labels) are
// summed. The strings need to live for the duration of the call only; descriptions for good.
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

// Implemented by a component that has state to show.
class Collector {
 public:
  // Called on the scraping thread, one scrape at a time, with the registry's lock held: takes the
  // component's own locks briefly, and never registers or unregisters a collector.
  virtual void Collect(Visitor& visitor) const = 0;

 protected:
  ~Collector() = default;
};

}  // namespace tessera::metrics
