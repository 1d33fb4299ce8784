// Reload by SIGHUP and by the operator's call: each field that a reload applies, and that it
// applies all or nothing.

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/certificates.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/http_get.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr char kTwoTenants[] = R"("tenants":[{"name":"a","token":"x"},{"name":"b","token":"y"}])";

struct Answer {
  grpc::Status status;
  std::vector<std::string> applied;
  std::vector<std::string> needs_restart;
};

class Reload : public testing::Test {
 protected:
  ~Reload() override {
    daemon_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  void Start(const std::string& fields, std::vector<std::string> flags = {}) {
    flags.push_back("--metrics=127.0.0.1:0");
    daemon_ = DaemonProcess::Start(
        {.flags = flags, .folder = folder_, .config_json = Concat("{", fields, "}")});
    ASSERT_NE(daemon_, nullptr);
    std::smatch match;
    const std::string log = daemon_->Log();
    ASSERT_TRUE(std::regex_search(log, match, std::regex("port=([0-9]+)"))) << log;
    port_ = static_cast<std::uint16_t>(std::stoi(match[1]));
  }
  void Write(const std::string& fields) const {
    std::ofstream(folder_ + "/config.json") << "{" << fields << "}";
  }
  Answer Call() const {
    grpc::ClientContext context;
    v1::ReloadResponse response;
    Answer answer;
    answer.status =
        v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin())->Reload(&context, {}, &response);
    answer.applied.assign(response.applied().begin(), response.applied().end());
    answer.needs_restart.assign(response.needs_restart().begin(), response.needs_restart().end());
    return answer;
  }
  grpc::Status Attach(RawWorker& worker, const std::string& token) const {
    v1::Hello hello = RawWorker::GoodHello();
    hello.set_tenant_token(token);
    return worker.Attach(hello);
  }
  bool Attaches(const std::string& token) const {
    RawWorker worker(daemon_->Connect());
    return Attach(worker, token).ok();
  }
  v1::StatsResponse Stats() const {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    EXPECT_TRUE(
        v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin())->NodeStats(&context, {}, &stats).ok());
    return stats;
  }
  double Metric(const std::string& name) const {
    const std::string metrics = fakes::HttpGet(port_, "/metrics");
    std::smatch match;
    const bool found = std::regex_search(metrics, match, std::regex("\n" + name + " ([0-9.e+]+)"));
    return found ? std::stod(match[1]) : -1;
  }
  std::string AwaitLog(const std::string& text) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::string log;
    do {
      log = daemon_->Log();
    } while (log.find(text) == std::string::npos && std::chrono::steady_clock::now() < deadline);
    EXPECT_THAT(log, HasSubstr(text));
    return log;
  }

  const std::string folder_ = fakes::MakeTemporaryFolder();
  std::unique_ptr<DaemonProcess> daemon_;
  std::uint16_t port_ = 0;
};

TEST_F(Reload, NothingChanged) {
  ASSERT_NO_FATAL_FAILURE(Start(kTwoTenants));
  const Answer answer = Call();
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_THAT(answer.applied, IsEmpty());
  EXPECT_THAT(answer.needs_restart, IsEmpty());
  EXPECT_EQ(Metric("tessera_config_last_reload_successful"), 1);
}

TEST_F(Reload, SighupAppliesAChangedLogLevel) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("log_level":"info")"));
  Write(R"("log_level":"debug")");
  daemon_->Kill(SIGHUP);
  AwaitLog("reloaded applied=log_level needs_restart=none");
  EXPECT_FALSE(Attaches("nobody's"));
  // A failed call is logged at that level.
  grpc::ClientContext context;
  v1::EvictResponse response;
  v1::EvictRequest request;
  request.set_sequence_id(4711);
  EXPECT_FALSE(
      v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin())->Evict(&context, request, &response).ok());
  AwaitLog("debug call failed method=Evict");
}

TEST_F(Reload, TenantsAreAddedAndTokensReplaced) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("tenants":[{"name":"a","token":"x"}])"));
  RawWorker before(daemon_->Connect());
  ASSERT_TRUE(Attach(before, "x").ok());
  Write(R"("tenants":[{"name":"a","token":"new"},{"name":"b","token":"y"}])");
  const Answer answer = Call();
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_THAT(answer.applied, ElementsAre("tenants"));
  EXPECT_FALSE(Attaches("x"));
  EXPECT_TRUE(Attaches("new"));
  // The added tenant works.
  RawWorker added(daemon_->Connect());
  ASSERT_TRUE(Attach(added, "y").ok());
  EXPECT_EQ(added.welcome().tenant(), "b");
  // So does the session that came with the old token.
  for (RawWorker* worker : {&before, &added}) {
    v1::RegisterModelRequest request;
    *request.mutable_model() = fakes::SmallModel();
    v1::RegisterModelResponse model;
    const grpc::Status registered = worker->RegisterModel(request, &model);
    EXPECT_TRUE(registered.ok()) << registered.error_message();
    v1::CreateSequenceRequest create;
    create.set_model_id(model.model_id());
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker->CreateSequence(create, &created).ok());
  }
}

TEST_F(Reload, ATokenFileIsReadAgain) {
  std::ofstream(folder_ + "/token") << "first\n";
  std::filesystem::permissions(folder_ + "/token", std::filesystem::perms(0600));
  ASSERT_NO_FATAL_FAILURE(
      Start(Concat(R"("tenants":[{"name":"a","token_file":")", folder_, R"(/token"}])")));
  EXPECT_TRUE(Attaches("first"));
  std::ofstream(folder_ + "/token") << "second\n";
  EXPECT_THAT(Call().applied, ElementsAre("tenants"));
  EXPECT_FALSE(Attaches("first"));
  EXPECT_TRUE(Attaches("second"));
}

TEST_F(Reload, LimitsOfATenantAreReplaced) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("tenants":[{"name":"a","token":"x"}])"));
  Write(R"("tenants":[{"name":"a","token":"x","hard_limit_bytes":"134217728",
                       "soft_limit_bytes":"67108864"}])");
  EXPECT_THAT(Call().applied, ElementsAre("tenants"));
  const v1::StatsResponse stats = Stats();
  ASSERT_EQ(stats.tenants_size(), 1);
  EXPECT_EQ(stats.tenants(0).hard_limit_bytes(), 128u << 20);
  EXPECT_EQ(stats.tenants(0).soft_limit_bytes(), 64u << 20);
}

TEST_F(Reload, ARemovedTenantAdmitsNobodyAndItsSessionsGoOn) {
  ASSERT_NO_FATAL_FAILURE(Start(kTwoTenants));
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(Attach(worker, "y").ok());
  Write(R"("tenants":[{"name":"a","token":"x"}])");
  EXPECT_THAT(Call().applied, ElementsAre("tenants"));
  RawWorker late(daemon_->Connect());
  EXPECT_EQ(Attach(late, "y").error_code(), grpc::StatusCode::PERMISSION_DENIED);
  v1::RegisterModelRequest request;
  *request.mutable_model() = fakes::SmallModel();
  v1::RegisterModelResponse model;
  EXPECT_TRUE(worker.RegisterModel(request, &model).ok());
  EXPECT_TRUE(worker.Leave().ok());
}

TEST_F(Reload, DrainLimitAndSlowCallsAreReplaced) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("drain_limit_ms":60000,"slow_call_ms":0)"));
  Write(R"("drain_limit_ms":1,"slow_call_ms":3600000)");
  EXPECT_THAT(Call().applied, testing::UnorderedElementsAre("drain_limit_ms", "slow_call_ms"));
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon_->Kill(SIGTERM);
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
  EXPECT_THAT(daemon_->Log(), HasSubstr("draining limit_ms=1"));
}

TEST_F(Reload, UnixPeersAreReplaced) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be other users";
  ASSERT_NO_FATAL_FAILURE(Start(R"("unix_peers":"uid:12345")", {"--unix-socket-mode=0666"}));
  ASSERT_EQ(::chmod(folder_.c_str(), 0711), 0);
  const auto greeted = [&](const std::string& path) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setgroups(0, nullptr) != 0 || ::setgid(54321) != 0 || ::setuid(54321) != 0) ::_exit(9);
      const absl::StatusOr<Fd> socket = ConnectUnix(path);
      char byte = 0;
      ::_exit(socket.ok() && ::read(socket->get(), &byte, 1) == 1 ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  EXPECT_FALSE(greeted(daemon_->socket_path()));
  Write(R"("unix_peers":"uid:54321")");
  EXPECT_THAT(Call().applied, ElementsAre("unix_peers"));
  EXPECT_TRUE(greeted(daemon_->socket_path()));
  // The descriptor socket admits it, too: it waits for an opening instead of closing.
  EXPECT_THAT(daemon_->Log(), Not(HasSubstr("descriptor connection refused")));
}

TEST_F(Reload, CertificatesAreCheckedAndReported) {
  fakes::CertificateAuthority ca("one");
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
    std::filesystem::permissions(folder_ + "/" + name, std::filesystem::perms(0600));
  };
  const fakes::KeyPair first = ca.Issue("127.0.0.1");
  write("server.pem", first.certificate);
  write("server.key", first.key);
  ASSERT_NO_FATAL_FAILURE(
      Start("", {"--listen=127.0.0.1:0", "--tls-certificate-file=" + folder_ + "/server.pem",
                 "--tls-key-file=" + folder_ + "/server.key"}));
  EXPECT_THAT(Call().applied, IsEmpty());
  const fakes::KeyPair second = ca.Issue("127.0.0.1");
  write("server.pem", second.certificate);
  const Answer half = Call();
  EXPECT_EQ(half.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(half.status.error_message(), HasSubstr("tls_key_file"));
  write("server.key", second.key);
  const Answer whole = Call();
  EXPECT_TRUE(whole.status.ok()) << whole.status.error_message();
  EXPECT_THAT(whole.applied, ElementsAre("tls_certificate_file"));
}

TEST_F(Reload, FieldsThatNeedARestartAreNamedAndNotApplied) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("max_sessions":5)"));
  Write(R"("max_sessions":7,"compactor_threads":3,"log_level":"warning")");
  for (int i = 0; i < 2; ++i) {
    const Answer answer = Call();
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    EXPECT_EQ(answer.applied,
              i == 0 ? std::vector<std::string>{"log_level"} : std::vector<std::string>());
    EXPECT_THAT(answer.needs_restart,
                testing::UnorderedElementsAre("max_sessions", "compactor_threads"));
  }
  AwaitLog("warning reloaded applied=none needs_restart=");
}

TEST_F(Reload, AllOrNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(kTwoTenants));
  const double loaded = Metric("tessera_config_last_reload_success_timestamp_seconds");
  EXPECT_GT(loaded, 1.7e9);
  const std::string changed =
      R"("log_level":"debug","tenants":[{"name":"a","token":"new"},{"name":"c","token":"z"}])";
  // A wrong value, an unknown field, a file that is no JSON, a missing token file.
  for (const std::string& wrong :
       {Concat(changed, R"(,"drain_limit_ms":99999999)"), Concat(changed, R"(,"no_such_field":1)"),
        Concat(changed, ",,"),
        std::string(R"("log_level":"debug","tenants":[{"name":"a","token":"new"},)"
                    R"({"name":"c","token_file":"/nowhere"}])")}) {
    Write(wrong);
    const Answer answer = Call();
    EXPECT_FALSE(answer.status.ok()) << wrong;
    EXPECT_FALSE(answer.status.error_message().empty());
    EXPECT_EQ(Metric("tessera_config_last_reload_successful"), 0);
    EXPECT_EQ(Metric("tessera_config_last_reload_success_timestamp_seconds"), loaded);
    EXPECT_TRUE(Attaches("x"));
    EXPECT_FALSE(Attaches("new"));
    EXPECT_FALSE(Attaches("z"));
    EXPECT_EQ(Stats().tenants_size(), 2);
  }
  EXPECT_THAT(daemon_->Log(), Not(HasSubstr(" debug ")));
  EXPECT_THAT(daemon_->Log(), HasSubstr("error reload failed: the daemon keeps its configuration"));
  Write(changed);
  EXPECT_THAT(Call().applied, testing::UnorderedElementsAre("log_level", "tenants"));
  EXPECT_EQ(Metric("tessera_config_last_reload_successful"), 1);
  EXPECT_GT(Metric("tessera_config_last_reload_success_timestamp_seconds"), loaded);
}

TEST_F(Reload, ADrainingDaemonReloadsNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(R"("drain_limit_ms":60000)"));
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon_->Kill(SIGTERM);
  AwaitLog("draining limit_ms=60000");
  Answer answer;
  do {
    answer = Call();  // the drain has begun when the log says so, or just after
  } while (answer.status.ok());
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(worker.Leave().ok());
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
}

}  // namespace
}  // namespace tessera
