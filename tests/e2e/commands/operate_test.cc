// Operations: health probes, reflection, admin calls, draining, SIGTERM.

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
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
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::HasSubstr;

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Text(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// Makes one call without generated code, as a generic gRPC tool would.
std::string Call(const DaemonProcess& daemon, const std::string& method,
                 const std::string& request) {
  grpc::GenericStub stub(daemon.ConnectAdmin());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  auto stream = stub.PrepareCall(&context, method, &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto step = [&] { return queue.Next(&tag, &ok) && ok; };
  stream->StartCall(nullptr);
  if (!step()) return "";
  stream->Write(Bytes(request), nullptr);
  if (!step()) return "";
  stream->WritesDone(nullptr);
  if (!step()) return "";
  grpc::ByteBuffer response;
  stream->Read(&response, nullptr);
  if (!step()) return "";
  return Text(response);
}

TEST(Operate, HealthServiceAnswers) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  // HealthCheckResponse{status: SERVING}
  EXPECT_EQ(Call(*daemon, "/grpc.health.v1.Health/Check", ""), std::string("\x08\x01"));
}

TEST(Operate, ReflectionListsTheServicesOfOperators) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  // ServerReflectionRequest{list_services: ""}
  const std::string services =
      Call(*daemon, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
           std::string("\x3a\x00", 2));
  EXPECT_THAT(services, HasSubstr("tessera.v1.TesseraAdmin"));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
}

TEST(Operate, SocketsHaveTheConfiguredMode) {
  const auto daemon = DaemonProcess::Start({.flags = {"--unix-socket-mode=0600"}});
  ASSERT_NE(daemon, nullptr);
  for (const std::string& path : {daemon->socket_path(), daemon->socket_path() + ".fd"}) {
    struct stat found {};
    ASSERT_EQ(::stat(path.c_str(), &found), 0) << path;
    EXPECT_TRUE(S_ISSOCK(found.st_mode));
    EXPECT_EQ(found.st_mode & 0777, 0600u) << path;
  }
}

TEST(Operate, TheOperatorsSocketIsForTheDaemonsUser) {
  const auto daemon = DaemonProcess::Start({.flags = {"--unix-socket-mode=0666"}});
  ASSERT_NE(daemon, nullptr);
  struct stat found {};
  ASSERT_EQ(::stat((daemon->socket_path() + ".admin").c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
}

// "" if the line is not there.
std::string LineOf(const std::string& path, const std::string& begin) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(begin)) return line;
  }
  return "";
}

TEST(Operate, NoCoreDumpShowsRowsUnlessItIsAllowed) {
  for (const bool allowed : {false, true}) {
    const auto daemon = DaemonProcess::Start(
        {.flags = {allowed ? "--allow-core-dumps=true" : "--allow-core-dumps=false"}});
    ASSERT_NE(daemon, nullptr);
    const std::string proc = Concat("/proc/", daemon->pid());
    EXPECT_THAT(LineOf(proc + "/status", "NoNewPrivs:"), HasSubstr("1"));
    const std::string limit = LineOf(proc + "/limits", "Max core file size");
    EXPECT_EQ(std::regex_search(limit, std::regex("size +0 +0 ")), !allowed) << limit;
    // What is not dumpable belongs to root in /proc, which is visible to other users only.
    if (::geteuid() == 0) continue;
    struct stat found {};
    ASSERT_EQ(::stat((proc + "/mem").c_str(), &found), 0);
    EXPECT_EQ(found.st_uid == ::geteuid(), allowed);
  }
}

TEST(Operate, EachThreadLosesTheSystemCallsThatItDoesNotNeed) {
  for (const bool allowed : {false, true}) {
    const std::string action = allowed ? "allow" : "refuse";
    const auto daemon = DaemonProcess::Start({.flags = {"--unused-system-calls=" + action}});
    ASSERT_NE(daemon, nullptr);
    int threads = 0;
    for (const auto& thread :
         std::filesystem::directory_iterator(Concat("/proc/", daemon->pid(), "/task"))) {
      // 0: no filter, 2: one that the process has set
      EXPECT_EQ(LineOf(thread.path() / "status", "Seccomp:"),
                allowed ? "Seccomp:\t0" : "Seccomp:\t2")
          << thread.path();
      ++threads;
    }
    EXPECT_GT(threads, 3);
  }
}

TEST(Operate, WorkersAddressesServeNoOperator) {
  const auto daemon = DaemonProcess::Start({.flags = {"--listen=127.0.0.1:0"}});
  ASSERT_NE(daemon, nullptr);
  std::smatch match;
  const std::string log = daemon->Log();
  ASSERT_TRUE(std::regex_search(log, match, std::regex("address=(127.0.0.1:[0-9]+)"))) << log;
  const auto channel = grpc::CreateChannel(match[1], grpc::InsecureChannelCredentials());
  v1::ListSessionsResponse sessions;
  for (const auto& door : {channel, daemon->Connect()}) {
    grpc::ClientContext context;
    const grpc::Status status =
        v1::TesseraAdmin::NewStub(door)->ListSessions(&context, {}, &sessions);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(), HasSubstr("admin_listen"));
  }
  RawWorker worker(channel);
  ASSERT_TRUE(worker.Attach().ok());
  EXPECT_EQ(worker.welcome().descriptor_socket(), "");
}

TEST(Operate, SigtermWithoutSessionsExitsAtOnce) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  daemon->Kill(SIGTERM);
  EXPECT_EQ(daemon->WaitForExit(5), 0);
  EXPECT_THAT(daemon->Log(), HasSubstr("stopped"));
  struct stat found {};
  EXPECT_NE(::stat(daemon->socket_path().c_str(), &found), 0);
  EXPECT_NE(::stat((daemon->socket_path() + ".fd").c_str(), &found), 0);
}

TEST(Operate, SigtermDrainsWithinItsLimit) {
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=1500"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  const auto begun = std::chrono::steady_clock::now();
  daemon->Kill(SIGTERM);
  // The session lives until the limit, new ones are refused, and its final status gives the reason.
  RawWorker late(daemon->Connect());
  grpc::Status refused;
  do {
    refused = late.Attach();
  } while (refused.ok());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(daemon->WaitForExit(10), 0);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1400));
  EXPECT_EQ(worker.Leave().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(Operate, DrainEndsWithTheLastSession) {
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=60000"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  auto admin = v1::TesseraAdmin::NewStub(daemon->ConnectAdmin());
  grpc::ClientContext context;
  v1::DrainResponse drained;
  ASSERT_TRUE(admin->Drain(&context, {}, &drained).ok());
  EXPECT_EQ(drained.sessions(), 1);
  worker.Leave();
  EXPECT_EQ(daemon->WaitForExit(10), 0);
}

absl::Status Drain(const DaemonProcess& daemon, std::uint64_t limit_ms) {
  grpc::ClientContext context;
  v1::DrainRequest request;
  request.set_limit_ms(limit_ms);
  v1::DrainResponse drained;
  const grpc::Status status =
      v1::TesseraAdmin::NewStub(daemon.ConnectAdmin())->Drain(&context, request, &drained);
  return status.ok() ? absl::OkStatus() : absl::UnknownError(status.error_message());
}

TEST(Operate, AFurtherDrainOnlyShortensTheFirst) {
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=60000"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  ASSERT_TRUE(Drain(*daemon, 50000).ok());
  ASSERT_TRUE(Drain(*daemon, 70000).ok());
  daemon->Kill(SIGTERM);
  ASSERT_TRUE(Drain(*daemon, 1).ok());
  EXPECT_EQ(daemon->WaitForExit(20), 0);
  EXPECT_EQ(worker.Leave().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(daemon->Log(), HasSubstr("reason=drained"));
  EXPECT_THAT(daemon->Log(), HasSubstr("stopped"));
}

TEST(Operate, ASecondSigtermStopsAtOnce) {
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=60000"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon->Kill(SIGTERM);
  RawWorker late(daemon->Connect());
  while (late.Attach().ok()) {
  }
  daemon->Kill(SIGTERM);
  EXPECT_EQ(daemon->WaitForExit(10), 0);
  EXPECT_THAT(daemon->Log(), HasSubstr("second stop signal"));
}

TEST(Operate, SighupNeverEndsTheDaemon) {
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=60000"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon->Kill(SIGHUP);
  while (daemon->Log().find("reloaded") == std::string::npos) ASSERT_TRUE(daemon->Lives());
  ASSERT_TRUE(Drain(*daemon, 50000).ok());
  while (daemon->Log().find("draining limit_ms=50000") == std::string::npos) {
    ASSERT_TRUE(daemon->Lives());
  }
  daemon->Kill(SIGHUP);
  while (daemon->Log().find("SIGHUP ignored: the daemon is draining") == std::string::npos) {
    ASSERT_TRUE(daemon->Lives());
  }
  EXPECT_TRUE(worker.Leave().ok());
  EXPECT_EQ(daemon->WaitForExit(10), 0);
}

TEST(Operate, ADrainHasTheLongestLimitThereIs) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  ASSERT_TRUE(Drain(*daemon, ~std::uint64_t{0}).ok());
  // The daemon does not cut the session: the worker is notified of the drain and leaves.
  EXPECT_TRUE(worker.Leave().ok());
  EXPECT_EQ(daemon->WaitForExit(10), 0);
  EXPECT_THAT(daemon->Log(), HasSubstr("limit_ms=3600000"));
}

TEST(Operate, AdminSeesSessionsAndEvictsSequences) {
  const auto daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  v1::RegisterModelRequest request;
  *request.mutable_model() = fakes::SmallModel();
  v1::RegisterModelResponse model;
  ASSERT_TRUE(worker.RegisterModel(request, &model).ok());
  v1::CreateSequenceRequest create;
  create.set_model_id(model.model_id());
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(worker.CreateSequence(create, &created).ok());

  auto admin = v1::TesseraAdmin::NewStub(daemon->ConnectAdmin());
  grpc::ClientContext first;
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(admin->ListSessions(&first, {}, &sessions).ok());
  ASSERT_EQ(sessions.sessions_size(), 1);
  EXPECT_EQ(sessions.sessions(0).worker_name(), "raw");
  EXPECT_EQ(sessions.sessions(0).sequences(), 1);
  grpc::ClientContext second;
  v1::ListSequencesResponse sequences;
  ASSERT_TRUE(admin->ListSequences(&second, {}, &sequences).ok());
  ASSERT_EQ(sequences.total(), 1);
  EXPECT_EQ(sequences.sequences(0).sequence_id(), created.sequence_id());
  EXPECT_EQ(sequences.sequences(0).model(), "small-2");
  grpc::ClientContext third;
  v1::EvictRequest evict;
  evict.set_sequence_id(created.sequence_id());
  v1::EvictResponse evicted;
  EXPECT_TRUE(admin->Evict(&third, evict, &evicted).ok());
  v1::DescribeRequest describe;
  describe.set_sequence_id(created.sequence_id());
  v1::DescribeResponse described;
  EXPECT_EQ(worker.Describe(describe, &described).error_code(), grpc::StatusCode::NOT_FOUND);
  grpc::ClientContext fourth;
  EXPECT_EQ(admin->Evict(&fourth, evict, &evicted).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST(Operate, PrintPoliciesShowsWhatTheyMaySay) {
  const fakes::FinishedDaemon printed = fakes::RunDaemonToEnd({"--print-policies"});
  EXPECT_EQ(printed.exit_code, 0);
  for (const char* word : {"mosaickv", "quest", "min_segment", "dense_layers"}) {
    EXPECT_THAT(printed.output, HasSubstr(word));
  }
}

TEST(Operate, PrintConfigShowsEveryDefault) {
  const fakes::FinishedDaemon printed = fakes::RunDaemonToEnd({"--print-config"});
  EXPECT_EQ(printed.exit_code, 0);
  for (const char* field : {"listen", "pool_bytes", "pin_limit_ms", "tenants", "drain_limit_ms"}) {
    EXPECT_THAT(printed.output, HasSubstr(field));
  }
}

TEST(Operate, CheckConfigSaysOkOrWhatIsWrong) {
  const fakes::FinishedDaemon good =
      fakes::RunDaemonToEnd({"--check-config", "--device=cpu", "--pool-bytes=256MiB"});
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_THAT(good.output, testing::EndsWith("\nok\n"));
  EXPECT_THAT(good.output, HasSubstr("memory: pool_bytes 256.0 MiB + host_tier_bytes "));
  const fakes::FinishedDaemon warned =
      fakes::RunDaemonToEnd({"--check-config", "--device=cpu", "--listen=0.0.0.0:7400"});
  EXPECT_EQ(warned.exit_code, 0);
  EXPECT_THAT(warned.output, HasSubstr("warning: listen: 0.0.0.0:7400 is open to the network"));
  EXPECT_THAT(warned.output, HasSubstr("--pool-bytes sets it"));
  EXPECT_THAT(warned.output, HasSubstr("ok\n"));
  const std::vector<std::string> bad[] = {{"--check-config", "--max-sessions=0"},
                                          {"--check-config", "--max-session=1"},
                                          {"--check-config", "--config=/no/such/file"}};
  for (const std::vector<std::string>& args : bad) {
    const fakes::FinishedDaemon refused = fakes::RunDaemonToEnd(args);
    EXPECT_EQ(refused.exit_code, 2) << args[1];
    EXPECT_THAT(refused.output, testing::StartsWith("tesserad: ")) << args[1];
    EXPECT_THAT(refused.output, testing::Not(HasSubstr("ok"))) << args[1];
  }
}

TEST(Operate, CheckConfigReadsTheTlsFiles) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string file = folder + "/no.crt";
  const fakes::FinishedDaemon refused = fakes::RunDaemonToEnd(
      {"--check-config", "--device=cpu", "--pool-bytes=64MiB", "--listen=127.0.0.1:0",
       "--tls-certificate-file=" + file, "--tls-key-file=" + file});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.output, HasSubstr("tls_certificate_file: \"" + file + "\""));
  std::filesystem::remove_all(folder);
}

TEST(Operate, PrepareDirectoryMakesItAndExits) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string path = folder + "/tessera";
  const std::string owner =
      "--owner=" + std::to_string(::getuid()) + ":" + std::to_string(::getgid());
  const auto prepare = [&] {
    return fakes::RunDaemonToEnd({"--prepare-directory=" + path, owner, "--mode=0700"});
  };
  const fakes::FinishedDaemon made = prepare();
  EXPECT_EQ(made.exit_code, 0);
  EXPECT_THAT(made.output, HasSubstr(path + ": made, owner "));
  struct stat found {};
  ASSERT_EQ(::stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777, 0700u);
  EXPECT_THAT(prepare().output, HasSubstr(path + ": unchanged, "));
  std::filesystem::remove_all(path);
  std::filesystem::create_directory_symlink(folder, path);
  const fakes::FinishedDaemon refused = prepare();
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, HasSubstr("is a symbolic link"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
