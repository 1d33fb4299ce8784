// Reads a daemon's metrics as Prometheus does.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "tests/fakes/daemon/http_get.h"

namespace tessera::fakes {

struct Series {
  std::string name;    // with the suffix _bucket, _sum or _count if it belongs to a histogram
  std::string labels;  // "a=\"x\",b=\"y\""
  double value = 0;
};

inline std::vector<Series> Scrape(std::uint16_t port) {
  std::vector<Series> all;
  std::istringstream text(HttpGet(port, "/metrics"));
  for (std::string line; std::getline(text, line);) {
    if (line.empty() || line.front() == '#') continue;
    const std::size_t value = line.rfind(' ');
    if (value == std::string::npos) continue;
    Series series{.name = line.substr(0, value), .labels = {}, .value = 0};
    series.value = std::stod(line.substr(value + 1));
    if (const std::size_t brace = series.name.find('{'); brace != std::string::npos) {
      series.labels = series.name.substr(brace + 1, series.name.size() - brace - 2);
      series.name.resize(brace);
    }
    all.push_back(std::move(series));
  }
  return all;
}

}  // namespace tessera::fakes
