// deploy/docs/metrics.md, as it follows from the list of metrics and from what uses them.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::metrics {

// `deploy`: the folder with grafana/*.json and prometheus/*.yml, whose panels and alerts are named.
std::string MetricReference(const std::filesystem::path& deploy);

}  // namespace tessera::metrics
