// Log lines about single calls: the operator's changes, slow calls, failed calls, and traces.

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

constexpr char kTraceParent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
constexpr char kTraceField[] = "trace_id=4bf92f3577b34da6a3ce929d0e0e4736";

class CallLogs : public testing::Test {
 protected:
  void Start(std::vector<std::string> flags) {
    daemon_ = DaemonProcess::Start({.flags = std::move(flags)});
    ASSERT_NE(daemon_, nullptr);
  }
  grpc::Status Evict(std::uint64_t id, bool traced = false) const {
    grpc::ClientContext context;
    if (traced) context.AddMetadata("traceparent", kTraceParent);
    v1::EvictRequest request;
    request.set_sequence_id(id);
    v1::EvictResponse response;
    return v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin())->Evict(&context, request, &response);
  }
  std::string AwaitLog(const std::string& text) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::string log;
    do {
      log = daemon_->Log();
    } while (log.find(text) == std::string::npos && std::chrono::steady_clock::now() < deadline);
    return log;
  }
  // Runs `act` in a process of its own, and returns its exit status.
  static int InProcess(const std::function<int()>& act) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(act());
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(CallLogs, AChangeNamesMethodObjectOutcomeAndCaller) {
  ASSERT_NO_FATAL_FAILURE(Start({}));
  EXPECT_EQ(Evict(4711, /*traced=*/true).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(
      AwaitLog("method=Evict"),
      HasSubstr(Concat("info admin call audit=true method=Evict object=\"sequence or prefix "
                       "4711\" outcome=NOT_FOUND uid=",
                       ::getuid(), " gid=", ::getgid(), " pid=", ::getpid(),
                       " like_this_before=0 error=")));
  EXPECT_THAT(daemon_->Log(), HasSubstr(kTraceField));

  auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  grpc::ClientContext listing;
  v1::ListSessionsResponse sessions;
  EXPECT_TRUE(admin->ListSessions(&listing, {}, &sessions).ok());
  grpc::ClientContext reloading;
  v1::ReloadResponse reloaded;
  EXPECT_TRUE(admin->Reload(&reloading, {}, &reloaded).ok());
  EXPECT_THAT(AwaitLog("method=Reload"),
              AllOf(HasSubstr("method=Reload object=configuration outcome=OK uid="),
                    Not(HasSubstr("method=ListSessions"))));
  grpc::ClientContext draining;
  v1::DrainResponse drained;
  v1::DrainRequest drain;
  drain.set_limit_ms(7);
  EXPECT_TRUE(admin->Drain(&draining, drain, &drained).ok());
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
  EXPECT_THAT(daemon_->Log(), HasSubstr("method=Drain object=\"daemon, limit_ms 7\" outcome=OK"));
}

// Each connection has its own caller, whatever others do at the same time.
TEST_F(CallLogs, TheCallerIsTheOneWhoConnected) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be in other groups";
  ASSERT_NO_FATAL_FAILURE(Start({}));
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  const std::string tessera = TESSERA_BINARY;
  const std::string address = "--address=" + daemon_->address();
  const int status = InProcess([&] {
    if (::setgroups(0, nullptr) != 0 || ::setgid(4321) != 0) return 99;
    ::execl(tessera.c_str(), "tessera", "evict", "815", address.c_str(), nullptr);
    return 98;
  });
  EXPECT_EQ(status, 1);
  EXPECT_THAT(AwaitLog("method=Evict"),
              ContainsRegex("object=\"sequence or prefix [0-9]+\" outcome=NOT_FOUND uid=0 "
                            "gid=4321 pid=[1-9]"));
}

TEST_F(CallLogs, ACallerInAPidNamespaceThatTheDaemonDoesNotSeeIsMarked) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make pid namespaces";
  // The daemon runs in a namespace of its own, so it does not see this process.
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string program = folder + "/tesserad-in-a-namespace";
  std::ofstream(program) << "#!/bin/sh\nexec unshare --pid --fork --kill-child " TESSERAD_BINARY
                            " --device=cpu \"$@\"\n";
  ASSERT_EQ(::chmod(program.c_str(), 0700), 0);
  daemon_ = DaemonProcess::Start({.folder = folder, .binary = program});
  if (daemon_ == nullptr) GTEST_SKIP() << "this machine makes no pid namespace";
  EXPECT_FALSE(Evict(4711).ok());
  EXPECT_THAT(AwaitLog("method=Evict"),
              HasSubstr("pid=0 pid_namespace=other like_this_before=0 error="));
  daemon_.reset();
  std::filesystem::remove_all(folder);
}

TEST_F(CallLogs, ASlowCallIsLoggedWithItsTrace) {
  ASSERT_NO_FATAL_FAILURE(Start({"--slow-call-ms=1"}));
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  v1::RegisterModelRequest request;
  *request.mutable_model() = fakes::SmallModel(8);
  v1::RegisterModelResponse model;
  ASSERT_TRUE(worker.RegisterModel(request, &model).ok());
  v1::CreateSequenceRequest create;
  create.set_model_id(model.model_id());
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(worker.CreateSequence(create, &created).ok());
  // Thousands of rows take more than a millisecond.
  v1::AppendRequest append;
  *append.mutable_session() = worker.key();
  append.set_sequence_id(created.sequence_id());
  *append.mutable_key() = fakes::SmallRows(8, 2048, 1);
  *append.mutable_value() = fakes::SmallRows(8, 2048, 2);
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceParent);
  v1::AppendResponse appended;
  const grpc::Status status = worker.stub().Append(&context, append, &appended);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(AwaitLog("method=Append"),
              ContainsRegex(Concat("warning slow call method=Append seconds=[0-9.e-]+ outcome=OK "
                                   "like_this_before=[0-9]+ ",
                                   kTraceField)));
}

TEST_F(CallLogs, NoCallIsSlowWithoutALimit) {
  ASSERT_NO_FATAL_FAILURE(Start({"--slow-call-ms=0", "--log-level=debug"}));
  EXPECT_FALSE(Evict(4711, /*traced=*/true).ok());
  EXPECT_THAT(AwaitLog("call failed"), AllOf(HasSubstr("debug call failed method=Evict seconds="),
                                             HasSubstr(kTraceField), Not(HasSubstr("slow call"))));
}

}  // namespace
}  // namespace tessera
