#include "daemon/metrics/exposition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace tessera::metrics {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Exposition, IsPrometheusText) {
  Metrics metrics({.version = "0.1.0", .device = "cpu", .isa = "avx512"});
  metrics.session_ends_total.Increment(SessionEnd::kLost, 96);
  metrics.AddRpc("Tessera", "Append", RpcClass::kBulk)
      .Finished(absl::StatusCode::kOk, std::chrono::microseconds(300));
  const std::string text = ExpositionText(metrics);
  EXPECT_THAT(text, HasSubstr("# HELP tessera_session_ends_total Sessions"));
  EXPECT_THAT(text, HasSubstr("# TYPE tessera_session_ends_total counter\n"
                              "tessera_session_ends_total{reason=\"closed\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("tessera_session_ends_total{reason=\"lost\"} 96\n"));
  EXPECT_THAT(text, HasSubstr("tessera_build_info{version=\"0.1.0\",device=\"cpu\",isa=\"avx512\"} "
                              "1\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE tessera_rpc_duration_seconds histogram\n"));
  const std::string labels = "{service=\"Tessera\",class=\"bulk\"";
  EXPECT_THAT(text, HasSubstr("tessera_rpc_duration_seconds_count" + labels + "} 1\n"));
  EXPECT_THAT(text,
              HasSubstr("tessera_rpc_duration_seconds_bucket" + labels + ",le=\"0.0002\"} 0\n"));
  EXPECT_THAT(text,
              HasSubstr("tessera_rpc_duration_seconds_bucket" + labels + ",le=\"0.001\"} 1\n"));
  EXPECT_THAT(text,
              HasSubstr("tessera_rpc_duration_seconds_bucket" + labels + ",le=\"+Inf\"} 1\n"));
}

struct TwoPools final : Collector {
  void Collect(Visitor& visitor) const override {
    visitor.Add(kSequences, 2, "a", "held");
    visitor.Add(kSequences, 3, "b\"\n", "held");
    visitor.Add(kSequences, 4, "a", "held");
  }
};

TEST(Exposition, SumsASeriesThatIsReportedTwiceAndEscapesLabels) {
  Metrics metrics({});
  const TwoPools pools;
  const auto registration = metrics.Register(pools);
  const std::string text = ExpositionText(metrics);
  EXPECT_THAT(text, HasSubstr("# TYPE tessera_sequences gauge\n"
                              "tessera_sequences{tenant=\"a\",state=\"held\"} 6\n"
                              "tessera_sequences{tenant=\"b\\\"\\n\",state=\"held\"} 3\n"));
}

TEST(Exposition, AFamilyIsThereOnce) {
  Metrics metrics({});
  const std::string text = ExpositionText(metrics);
  const std::string help = "# HELP tessera_session_ends_total";
  const std::size_t first = text.find(help);
  ASSERT_NE(first, std::string::npos);
  EXPECT_THAT(text.substr(first + 1), Not(HasSubstr(help)));
}

}  // namespace
}  // namespace tessera::metrics
