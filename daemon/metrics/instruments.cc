#include "daemon/metrics/instruments.h"

#include <algorithm>
#include <limits>

namespace tessera::metrics {

void DurationHistogram::Observe(std::chrono::nanoseconds duration) {
  duration = std::max(duration, std::chrono::nanoseconds::zero());
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), duration);
  AddToBucket(static_cast<std::size_t>(bucket - bounds_.begin()), 1);
  AddToSum(duration);
}

void DurationHistogram::AddToBucket(std::size_t bucket, std::uint64_t observations) {
  counts_[bucket].fetch_add(observations, std::memory_order_relaxed);
}

void DurationHistogram::AddToSum(std::chrono::nanoseconds sum) {
  sum_nanoseconds_.fetch_add(sum.count(), std::memory_order_relaxed);
}

std::uint64_t DurationHistogram::count() const {
  std::uint64_t count = 0;
  for (const auto& bucket : counts_) count += bucket.load(std::memory_order_relaxed);
  return count;
}

void DurationHistogram::Visit(Visitor& visitor, const DescriptionView& description,
                              std::span<const std::string_view> labels) const {
  std::array<HistogramSample::Bucket, kMostBounds + 1> buckets;
  std::uint64_t cumulative = 0;
  for (std::size_t i = 0; i < this->buckets(); ++i) {
    cumulative += counts_[i].load(std::memory_order_relaxed);
    const bool last = i == bounds_.size();
    buckets[i] = {last ? std::numeric_limits<double>::infinity()
                       : std::chrono::duration<double>(bounds_[i]).count(),
                  cumulative};
  }
  const double sum = static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)) / 1e9;
  visitor.AddHistogram(description, labels,
                       {.buckets = std::span(buckets).first(this->buckets()), .sum = sum});
}

}  // namespace tessera::metrics
