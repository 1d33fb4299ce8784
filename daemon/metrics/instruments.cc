#include "daemon/metrics/instruments.h"

#include <algorithm>
#include <limits>

namespace tessera::metrics {

void DurationHistogram::Observe(std::chrono::nanoseconds duration) {
  const std::int64_t nanoseconds = std::max<std::int64_t>(duration.count(), 0);
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), nanoseconds);
  counts_[static_cast<std::size_t>(bucket - kBounds.begin())].fetch_add(1,
                                                                        std::memory_order_relaxed);
  sum_nanoseconds_.fetch_add(nanoseconds, std::memory_order_relaxed);
}

void DurationHistogram::Visit(Visitor& visitor, const DescriptionView& description,
                              std::span<const std::string_view> labels) const {
  std::array<HistogramSample::Bucket, kBounds.size() + 1> buckets;
  std::uint64_t cumulative = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    cumulative += counts_[i].load(std::memory_order_relaxed);
    const bool last = i == kBounds.size();
    buckets[i] = {
        last ? std::numeric_limits<double>::infinity() : static_cast<double>(kBounds[i]) / 1e9,
        cumulative};
  }
  const double sum = static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)) / 1e9;
  visitor.AddHistogram(description, labels, {.buckets = buckets, .sum = sum});
}

}  // namespace tessera::metrics
