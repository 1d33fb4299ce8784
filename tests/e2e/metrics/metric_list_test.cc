// The list of metrics as a whole: what a daemon reports is what is documented, every metric can
// move, and the number of series and the memory stay bounded.

#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <string>

#include "tessera/v1/admin.grpc.pb.h"
#include "tests/e2e/metrics/metrics_fixture.h"
#include "tests/fakes/daemon/certificates.h"

namespace tessera {
namespace {

using testing::HasSubstr;

constexpr std::size_t kIdleSeries = 300;
constexpr std::size_t kTenantSeries = 20;

// A configuration with tenants "t1", "t2", ..., each with a token of the same name.
std::string TenantsConfig(int tenants, const std::string& limits = "") {
  std::string json = R"({"tenants": [)";
  for (int i = 1; i <= tenants; ++i) {
    const std::string name = "t" + std::to_string(i);
    json += (i == 1 ? "" : ", ") + ("{\"name\": \"" + name) + "\", \"token\": \"" + name + "\"" +
            limits + "}";
  }
  return json + "]}";
}

v1::Hello HelloOf(const std::string& token) {
  v1::Hello hello = fakes::RawWorker::GoodHello();
  hello.set_tenant_token(token);
  return hello;
}

constexpr std::string_view kOfEvents = "tessera_kv_event";

class MetricList : public Metrics {
 protected:
  static std::size_t CountOf(const std::vector<fakes::Series>& all, const std::string& label) {
    std::size_t count = 0;
    for (const fakes::Series& series : all) {
      count += series.labels.find(label) != std::string::npos;
    }
    return count;
  }
  // Metrics that only a daemon with TLS, or with KV events, has.
  static bool NeedsOption(std::string_view name) {
    return name == metrics::kTlsCertificateExpiry.name || name.starts_with(kOfEvents);
  }
};

// Also those that count nothing yet, so that rates start from 0.
TEST_F(MetricList, AnIdleDaemonReportsExactlyTheDocumentedMetrics) {
  ASSERT_NO_FATAL_FAILURE(Start({.flags = Flags()}));
  const std::vector<fakes::Series> all = Scrape();
  std::set<std::string_view> reported;
  for (const fakes::Series& series : all) {
    const metrics::DescriptionView* const metric = DescriptionOf(series.name);
    ASSERT_NE(metric, nullptr) << series.name << " is not documented";
    reported.insert(metric->name);
    for (const std::string_view label : metric->labels) {
      EXPECT_THAT(series.labels, HasSubstr(std::string(label) + "=\"")) << series.name;
    }
  }
  for (const metrics::DescriptionView& metric : metrics::AllMetrics()) {
    EXPECT_EQ(reported.contains(metric.name), !NeedsOption(metric.name)) << metric.name;
  }
  EXPECT_LE(all.size(), kIdleSeries);
  std::printf("%zu series\n", all.size());
}

TEST_F(MetricList, EveryMethodHasItsSeriesBeforeItsFirstCall) {
  ASSERT_NO_FATAL_FAILURE(Start({.flags = Flags()}));
  std::map<std::string, int> methods;
  for (const fakes::Series& series : Scrape()) {
    if (!series.name.starts_with("tessera_rpc_")) continue;
    if (series.name == "tessera_rpc_requests_total") {
      EXPECT_THAT(series.labels, HasSubstr("code=\"OK\""));
      ++methods[series.labels.substr(0, series.labels.find(",code"))];
    }
    if (series.name == "tessera_rpc_seconds_total") ++methods[series.labels];
    EXPECT_EQ(series.value, 0) << series.name << series.labels;
  }
  for (const auto& [service, file] : {std::pair{"Tessera", v1::Hello::descriptor()->file()},
                                      {"TesseraAdmin", v1::DrainRequest::descriptor()->file()}}) {
    const google::protobuf::ServiceDescriptor& described = *file->FindServiceByName(service);
    for (int i = 0; i < described.method_count(); ++i) {
      const std::string labels =
          std::string("service=\"") + service + "\",method=\"" + described.method(i)->name() + "\"";
      EXPECT_EQ(methods[labels], 2) << labels;
    }
  }
}

TEST_F(MetricList, ATenantAddsTwentySeriesAtMost) {
  ASSERT_NO_FATAL_FAILURE(Start({.flags = Flags(), .config_json = TenantsConfig(3)}));
  ASSERT_NO_FATAL_FAILURE(Attach(HelloOf("t2")));
  Compress(NewSequence(100, "streaming:sink=4,recent=40"));
  const std::vector<fakes::Series> all = Scrape();
  for (const char* const name : {"t1", "t2", "t3"}) {
    const std::size_t series = CountOf(all, std::string("tenant=\"") + name + "\"");
    EXPECT_LE(series, kTenantSeries) << name;
    EXPECT_GT(series, 0u) << name;
  }
}

// A tenant without workers has no memory beyond its bookkeeping.
TEST_F(MetricList, HundredsOfIdleTenantsAreCheap) {
  constexpr int kTenants = 256;
  ASSERT_NO_FATAL_FAILURE(
      Start({.flags = Flags(), .pool_bytes = "1GiB", .config_json = TenantsConfig(kTenants)}));
  const std::vector<fakes::Series> all = Scrape();
  EXPECT_LE(all.size(), kIdleSeries + kTenantSeries * kTenants);
  EXPECT_LT(Value("process_resident_memory_bytes"), 100e6);
  std::printf("%d tenants: %zu series, %.1f MB resident\n", kTenants, all.size(),
              Value("process_resident_memory_bytes") / 1e6);
  // The last one works like any other.
  ASSERT_NO_FATAL_FAILURE(Attach(HelloOf("t256")));
  NewSequence(100);
  EXPECT_EQ(Value("tessera_sequence_tokens", "tenant=\"t256\""), 100);
}

TEST_F(MetricList, RefusalsNameTheTenantAndWhatIsFull) {
  ASSERT_NO_FATAL_FAILURE(
      Start({.flags = {"--metrics=127.0.0.1:0", "--host-tier-bytes=1MiB", "--offload-idle-ms=0"},
             .config_json = TenantsConfig(2, R"(, "hard_limit_bytes": 4194304,
                                               "soft_limit_bytes": 2097152)")}));
  ASSERT_NO_FATAL_FAILURE(Attach(HelloOf("t2")));
  EXPECT_EQ(Value("tessera_tenant_hard_limit_bytes", "tenant=\"t2\""), 4 << 20);
  EXPECT_EQ(Value("tessera_tenant_soft_limit_bytes", "tenant=\"t2\""), 2 << 20);
  grpc::Status status;
  // Sequences of 224 KiB, of which the tenant's share of the tier holds two.
  for (int i = 0; i < 60 && status.ok(); ++i) {
    v1::CreateSequenceRequest create;
    create.set_model_id(model_);
    v1::CreateSequenceResponse created;
    status = worker_->CreateSequence(create, &created);
    if (status.ok()) status = Append(created.sequence_id(), 200, 0);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_GE(Value("tessera_memory_refusals_total", "tenant=\"t2\",cause=\"quota\""), 1);
  EXPECT_EQ(Value("tessera_memory_refusals_total", "cause=\"node\""), 0);
  EXPECT_EQ(Value("tessera_memory_refusals_total", "tenant=\"t1\""), 0);
  EXPECT_GT(Value("tessera_pressure_climbs_total"), 0);
  EXPECT_GT(Value("tessera_pressure_steps_total", "rung=\"offload\""), 0);
  EXPECT_GT(Value("tessera_tier_errors_total", "tier=\"host\""), 0);  // the tier is full
}

TEST_F(MetricList, ANodeThatIsFullRefusesItsTenants) {
  ASSERT_NO_FATAL_FAILURE(
      Start({.flags = {"--metrics=127.0.0.1:0", "--host-tier-bytes=0", "--pool-extent-bytes=2MiB"},
             .pool_bytes = "16MiB"}));
  ASSERT_NO_FATAL_FAILURE(Attach());
  v1::CreateSequenceRequest create;
  create.set_model_id(model_);
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(worker_->CreateSequence(create, &created).ok());
  grpc::Status status;
  for (int i = 0; i < 20 && status.ok(); ++i) {
    status = Append(created.sequence_id(), 1000, static_cast<std::uint64_t>(i) * 1000);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_GE(Value("tessera_memory_refusals_total", "tenant=\"default\",cause=\"node\""), 1);
}

TEST_F(MetricList, TheAgeOfTheOldestJob) {
  ASSERT_NO_FATAL_FAILURE(Start({.flags = {"--metrics=127.0.0.1:0", "--compactor-threads=1"}}));
  ASSERT_NO_FATAL_FAILURE(Attach());
  EXPECT_EQ(Value("tessera_background_oldest_job_seconds"), 0);
  const std::uint64_t sequence = NewSequence(16000, "mosaickv:keep=0.25,loss_k=1,loss_v=1");
  auto compressed = std::async(std::launch::async, [&] { Compress(sequence); });
  EXPECT_TRUE(Becomes("tessera_background_oldest_job_seconds", "priority=\"seals\"", Positive));
  compressed.get();
  EXPECT_TRUE(Becomes("tessera_background_oldest_job_seconds", "",
                      [](double seconds) { return seconds == 0; }));
}

TEST_F(MetricList, ReadyUntilTheDrainBegins) {
  ASSERT_NO_FATAL_FAILURE(Start({.flags = Flags()}));
  ASSERT_NO_FATAL_FAILURE(Attach());
  EXPECT_EQ(Value("tessera_ready"), 1);
  EXPECT_EQ(Value("tessera_draining"), 0);
  EXPECT_EQ(Value("tessera_device_healthy", "device=\"cpu\""), 1);
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  grpc::ClientContext context;
  v1::DrainResponse response;
  ASSERT_TRUE(admin->Drain(&context, {}, &response).ok());
  EXPECT_TRUE(Becomes("tessera_draining", "", Positive));
  EXPECT_EQ(Value("tessera_ready"), 0);
}

TEST_F(MetricList, TheCertificatesExpiryFollowsTheFile) {
  const std::string folder = fakes::MakeTemporaryFolder();
  fakes::CertificateAuthority authority("one");
  const fakes::KeyPair pair = authority.Issue("127.0.0.1");
  std::ofstream(folder + "/server.pem") << pair.certificate;
  std::ofstream(folder + "/server.key") << pair.key;
  std::filesystem::permissions(folder + "/server.key", std::filesystem::perms(0600));
  ASSERT_NO_FATAL_FAILURE(Start({.flags = {"--metrics=127.0.0.1:0", "--listen=127.0.0.1:0",
                                           "--tls-certificate-file=" + folder + "/server.pem",
                                           "--tls-key-file=" + folder + "/server.key"},
                                 .folder = folder}));
  const double left = Value("tessera_tls_certificate_expiry_timestamp_seconds") -
                      static_cast<double>(std::time(nullptr));
  EXPECT_GT(left, 0);
  EXPECT_LE(left, 3601);  // the test's certificates are valid for one hour
  std::ofstream(folder + "/server.pem") << "not a certificate";
  EXPECT_EQ(Value("tessera_tls_certificate_expiry_timestamp_seconds"), 0);  // absent
  daemon_.reset();
  std::filesystem::remove_all(folder);
}

// After all tests of this program: every documented metric was not 0 at some time.
class EveryMetricMoves : public testing::Environment {
 public:
  void TearDown() override;
};

class Moved : public Metrics {
 public:
  static const std::set<std::string>& Names() { return MovedMetrics(); }

 private:
  void TestBody() override {}
};

void EveryMetricMoves::TearDown() {
  if (GTEST_FLAG_GET(filter) != "*") return;  // the tests that move the others did not run
  for (const metrics::DescriptionView& metric : metrics::AllMetrics()) {
    if (metric.name == metrics::kLogDroppedTotal.name) continue;  // needs a log that nobody reads
    if (metric.name.starts_with(kOfEvents)) continue;  // ops_events and cluster_test move them
    EXPECT_TRUE(Moved::Names().contains(std::string(metric.name)))
        << "no test moves " << metric.name << " off zero";
  }
}

const testing::Environment* const kEveryMetricMoves =
    testing::AddGlobalTestEnvironment(new EveryMetricMoves);

}  // namespace
}  // namespace tessera
