#include "daemon/metrics/exposition.h"

#include <map>
#include <utility>

#include "prometheus/text_serializer.h"

namespace tessera::metrics {
namespace {

prometheus::MetricType TypeOf(Kind kind) {
  switch (kind) {
    case Kind::kCounter:
      return prometheus::MetricType::Counter;
    case Kind::kGauge:
      return prometheus::MetricType::Gauge;
    case Kind::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

class FamilyVisitor final : public Visitor {
 public:
  void AddSample(const DescriptionView& description, std::span<const std::string_view> labels,
                 double value) override {
    prometheus::ClientMetric& metric = SeriesOf(description, labels);
    if (description.kind == Kind::kCounter) {
      metric.counter.value += value;
    } else {
      metric.gauge.value += value;
    }
  }

  void AddHistogram(const DescriptionView& description, std::span<const std::string_view> labels,
                    const HistogramSample& sample) override {
    auto& histogram = SeriesOf(description, labels).histogram;
    histogram.bucket.resize(sample.buckets.size());
    for (std::size_t i = 0; i < sample.buckets.size(); ++i) {
      histogram.bucket[i].upper_bound = sample.buckets[i].upper_bound;
      histogram.bucket[i].cumulative_count += sample.buckets[i].cumulative_count;
    }
    // The count is taken from the last bucket, so that a scrape is consistent while counting goes
    // on.
    histogram.sample_count = histogram.bucket.back().cumulative_count;
    histogram.sample_sum += sample.sum;
  }

  std::vector<prometheus::MetricFamily> Take() {
    std::vector<prometheus::MetricFamily> families;
    for (auto& [name, family] : families_) {
      prometheus::MetricFamily& out = families.emplace_back();
      out.name = std::string(name);
      out.help = std::string(family.description.help);
      out.type = TypeOf(family.description.kind);
      for (auto& [labels, metric] : family.series) out.metric.push_back(std::move(metric));
    }
    return families;
  }

 private:
  struct Family {
    DescriptionView description;
    std::map<std::vector<std::string>, prometheus::ClientMetric> series;  // by label values
  };

  prometheus::ClientMetric& SeriesOf(const DescriptionView& description,
                                     std::span<const std::string_view> values) {
    Family& family = families_.try_emplace(description.name, Family{description, {}}).first->second;
    std::vector<std::string> key(values.begin(), values.end());
    const auto [found, added] = family.series.try_emplace(std::move(key));
    if (added) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        found->second.label.push_back({std::string(description.labels[i]), std::string(values[i])});
      }
    }
    return found->second;
  }

  std::map<std::string_view, Family> families_;
};

}  // namespace

std::vector<prometheus::MetricFamily> Scrape(const Metrics& metrics) {
  FamilyVisitor visitor;
  metrics.Visit(visitor);
  return visitor.Take();
}

std::string ExpositionText(const Metrics& metrics) {
  return prometheus::TextSerializer().Serialize(Scrape(metrics));
}

}  // namespace tessera::metrics
