// Converts samples to Prometheus's data model. prometheus-cpp is used inside this folder only.
#pragma once

#include <string>
#include <vector>

#include "daemon/metrics/metrics.h"
#include "prometheus/metric_family.h"

namespace tessera::metrics {

// Scrapes once. Families are ordered by name, and their series by labels.
std::vector<prometheus::MetricFamily> Scrape(const Metrics& metrics);

// Scrapes once, in Prometheus's text format, as served by /metrics.
std::string ExpositionText(const Metrics& metrics);

}  // namespace tessera::metrics
