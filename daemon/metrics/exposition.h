// From samples to what Prometheus reads. Nothing outside of this folder sees prometheus-cpp.
#pragma once

#include <string>
#include <vector>

#include "daemon/metrics/metrics.h"
#include "prometheus/metric_family.h"

namespace tessera::metrics {

// One scrape: families by name, each once, its series in the order of their labels.
std::vector<prometheus::MetricFamily> Scrape(const Metrics& metrics);

// The same in Prometheus's text format, as /metrics answers it.
std::string ExpositionText(const Metrics& metrics);

}  // namespace tessera::metrics
