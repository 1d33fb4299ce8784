#include "daemon/metrics/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

#include "tests/unit/metrics/metric_reference.h"

namespace tessera::metrics {
namespace {

TEST(Names, FollowThePrometheusRules) {
  std::set<std::string_view> names;
  for (const DescriptionView& metric : AllMetrics()) {
    const std::string name(metric.name);
    SCOPED_TRACE(name);
    EXPECT_TRUE(names.insert(metric.name).second) << "described twice";
    EXPECT_TRUE(std::regex_match(name, std::regex("(tessera|process)(_[a-z]+)+")));
    EXPECT_EQ(name.ends_with("_total"), metric.kind == Kind::kCounter);
    EXPECT_FALSE(
        std::regex_search(name, std::regex("_(ms|us|ns|kib|mib|milliseconds|kilobytes)(_|$)")))
        << "not a base unit";
    if (metric.kind == Kind::kHistogram) {
      EXPECT_TRUE(name.ends_with("_seconds"));
    }
    EXPECT_TRUE(metric.help.ends_with('.'));
    EXPECT_EQ(metric.help.find('\n'), std::string_view::npos);
    std::set<std::string_view> labels;
    for (const std::string_view label : metric.labels) {
      EXPECT_TRUE(std::regex_match(std::string(label), std::regex("[a-z]+")));
      EXPECT_TRUE(labels.insert(label).second) << label;
      EXPECT_NE(label, "le") << "reserved for histograms";
    }
  }
}

// AllMetrics is written by hand; it must have as many entries as names.h has descriptions.
TEST(Names, TheListIsComplete) {
  std::ifstream file(TESSERA_NAMES_H);
  ASSERT_TRUE(file) << TESSERA_NAMES_H;
  std::size_t described = 0;
  for (std::string line; std::getline(file, line);) {
    described += line.starts_with("inline constexpr Description<") ? 1 : 0;
  }
  EXPECT_EQ(AllMetrics().size(), described);
}

TEST(Names, ThePageOfMetricsIsGenerated) {
  const std::string deploy = TESSERA_DEPLOY;
  std::ifstream file(deploy + "/docs/metrics.md");
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_TRUE(page == MetricReference(deploy))
      << "run: build/tests/metric_reference deploy > deploy/docs/metrics.md";
}

}  // namespace
}  // namespace tessera::metrics
