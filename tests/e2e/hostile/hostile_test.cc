// Hostile peers on the descriptor socket do not stop others from working.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/platform/unix_socket.h"
#include "proto/shm/pin.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_mapping.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using shm::DescriptorKind;

class Hostile : public testing::Test {
 protected:
  void Start(const DaemonProcess::Options& options = {}) {
    daemon_ = DaemonProcess::Start(options);
    ASSERT_NE(daemon_, nullptr);
  }
  // Connections to the descriptor socket that send nothing.
  std::vector<Fd> Silent(int count) {
    std::vector<Fd> silent;
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<Fd> socket = ConnectUnix(daemon_->socket_path() + ".fd");
      EXPECT_TRUE(socket.ok()) << socket.status();
      if (socket.ok()) silent.push_back(*std::move(socket));
    }
    return silent;
  }
  std::unique_ptr<RawWorker> Worker() {
    auto worker = std::make_unique<RawWorker>(daemon_->Connect());
    EXPECT_TRUE(worker->Attach().ok());
    const absl::Status opened = worker->OpenDescriptors();
    EXPECT_TRUE(opened.ok()) << opened;
    return worker;
  }
  static std::uint64_t NewSequence(RawWorker& worker, int tokens) {
    v1::RegisterModelRequest model;
    *model.mutable_model() = fakes::SmallModel();
    v1::RegisterModelResponse registered;
    EXPECT_TRUE(worker.RegisterModel(model, &registered).ok());
    v1::CreateSequenceRequest create;
    create.set_model_id(registered.model_id());
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker.CreateSequence(create, &created).ok());
    v1::AppendRequest append;
    append.set_sequence_id(created.sequence_id());
    *append.mutable_key() = fakes::SmallRows(2, tokens, 1);
    *append.mutable_value() = fakes::SmallRows(2, tokens, 2);
    v1::AppendResponse appended;
    EXPECT_TRUE(worker.Append(append, &appended).ok());
    return created.sequence_id();
  }
  static void Ask(RawWorker& worker, const std::vector<shm::DescriptorRequest>& requests) {
    ASSERT_TRUE(SendMessage(worker.descriptor_socket().get(),
                            std::as_bytes(std::span<const shm::DescriptorRequest>(requests)))
                    .ok());
  }
  static shm::DescriptorAnswer NextAnswer(RawWorker& worker, Fd* fd) {
    shm::DescriptorAnswer answer{.code = shm::DescriptorCode::kBadRequest};
    const absl::Status received = ReceiveMessage(worker.descriptor_socket().get(),
                                                 std::as_writable_bytes(std::span(&answer, 1)), fd);
    EXPECT_TRUE(received.ok()) << received;
    return answer;
  }
  // Whether the peer of `socket` closes it within `time`.
  static bool Closes(const Fd& socket, timeval time) {
    EXPECT_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time), 0);
    char byte;
    return ::recv(socket.get(), &byte, 1, 0) == 0;
  }

  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(Hostile, SilentConnectionsKeepNobodyOut) {
  Start();
  const std::vector<Fd> silent = Silent(400);
  for (int i = 0; i < 5; ++i) Worker();
  const std::string log = daemon_->Log();
  int lines = 0;
  for (std::size_t at = 0; (at = log.find("connection refused", at)) != log.npos; ++at) ++lines;
  EXPECT_GE(lines, 1);
  EXPECT_LE(lines, 10);  // rate-limited: not one each
}

TEST_F(Hostile, ASilentConnectionIsClosed) {
  Start();
  const std::vector<Fd> silent = Silent(1);
  const std::unique_ptr<RawWorker> worker = Worker();
  EXPECT_TRUE(Closes(silent.front(), {.tv_sec = 20, .tv_usec = 0}));
  // A peer may be silent once it has sent its opening.
  EXPECT_TRUE(worker->Fetch(DescriptorKind::kControl, 0).ok());
}

TEST_F(Hostile, AWorkerThatDoesNotReadIsServedWhenItDoes) {
  Start();
  const std::unique_ptr<RawWorker> lazy = Worker();
  constexpr int kRequests = 300;
  Ask(*lazy, std::vector<shm::DescriptorRequest>(kRequests,
                                                 {.kind = DescriptorKind::kControl, .index = 0}));
  const std::unique_ptr<RawWorker> other = Worker();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(other->Fetch(DescriptorKind::kControl, 0).ok());
  }
  int unread = 0;
  ASSERT_EQ(::ioctl(lazy->descriptor_socket().get(), FIONREAD, &unread), 0);
  EXPECT_LE(unread, static_cast<int>(8 * sizeof(shm::DescriptorAnswer)));
  for (int i = 0; i < kRequests; ++i) {
    Fd fd;
    ASSERT_EQ(NextAnswer(*lazy, &fd).code, shm::DescriptorCode::kOk) << i;
    ASSERT_TRUE(fd.valid()) << i;
  }
}

TEST_F(Hostile, AWorkerThatDoesNotReadMayDie) {
  Start();
  const std::unique_ptr<RawWorker> lazy = Worker();
  Ask(*lazy,
      std::vector<shm::DescriptorRequest>(100, {.kind = DescriptorKind::kControl, .index = 0}));
  const std::unique_ptr<RawWorker> other = Worker();
  EXPECT_TRUE(other->Fetch(DescriptorKind::kControl, 0).ok());
  lazy->descriptor_socket().Close();
  // The daemon ends the stream, which the worker has not closed.
  EXPECT_EQ(lazy->AwaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(Hostile, OutOfDescriptorsItWaitsForSome) {
  Start();
  const int open = daemon_->OpenFds();
  rlimit before{};
  const rlimit few = {.rlim_cur = static_cast<rlim_t>(open) + 4, .rlim_max = 4096};
  ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, &few, &before), 0);
  std::vector<Fd> silent = Silent(20);
  const double cpu = daemon_->CpuSeconds();
  EXPECT_FALSE(Closes(silent.back(), {.tv_sec = 1, .tv_usec = 0}));
  EXPECT_LT(daemon_->CpuSeconds() - cpu, 0.3);
  EXPECT_THAT(daemon_->Log(), testing::HasSubstr("Too many open files"));
  silent.clear();
  const rlimit enough = {.rlim_cur = 4096, .rlim_max = 4096};
  ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, &enough, nullptr), 0);
  Worker();
}

// Requests that keep the daemon's waiting thread busy, followed by a wake, while the daemon is told
// to stop.
TEST_F(Hostile, ItMayBeToldToStopWhileItServes) {
  Start({.flags = {"--drain-limit-ms=0", "--staging-bytes=64MiB"}, .pool_bytes = "4GiB"});
  std::vector<std::unique_ptr<RawWorker>> workers;
  for (int i = 0; i < 32; ++i) workers.push_back(Worker());
  for (const std::unique_ptr<RawWorker>& worker : workers) {
    if (worker != workers.back()) Ask(*worker, {{.kind = DescriptorKind::kStaging, .index = 0}});
  }
  workers.back()->SignalWake();
  Fd staging;
  NextAnswer(*workers.front(), &staging);
  daemon_->Kill(SIGTERM);
  for (const std::unique_ptr<RawWorker>& worker : workers) worker->AwaitEnd();
  workers.clear();  // the daemon has no connection left to wait for
  EXPECT_EQ(daemon_->WaitForExit(30), 0);
}

// The worker leaves at a random moment of its attachment; only the daemon knows how far it is.
TEST_F(Hostile, AWorkerThatGoesWhileItIsGreetedLeavesNoSession) {
  Start({.flags = {"--max-sessions=4096"}});
  const std::shared_ptr<grpc::Channel> channel = daemon_->Connect();
  const auto stub = v1::Tessera::NewStub(channel);
  v1::AttachRequest hello;
  *hello.mutable_hello() = RawWorker::GoodHello();
  for (int i = 0; i < 2000; ++i) {
    grpc::ClientContext context;
    const auto stream = stub->Attach(&context);
    stream->Write(hello);
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(i % 500);
    while (std::chrono::steady_clock::now() < until) {
    }
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  v1::ListSessionsResponse sessions;
  do {
    grpc::ClientContext context;
    sessions.Clear();
    ASSERT_TRUE(admin->ListSessions(&context, {}, &sessions).ok());
  } while (sessions.sessions_size() > 0 && std::chrono::steady_clock::now() < deadline);
  EXPECT_EQ(sessions.sessions_size(), 0);
}

// A tenant that attaches without end is refused at its limit, and the other tenant can still
// attach.
TEST_F(Hostile, AFloodOfSessionsKeepsNoOtherTenantOut) {
  Start({.flags = {"--max-sessions=40"},
         .config_json = R"({"tenants": [{"name": "a"}, {"name": "b", "token": "sesame"}]})"});
  std::vector<std::unique_ptr<RawWorker>> flood;
  int refused = 0;
  for (int i = 0; i < 100; ++i) {
    auto worker = std::make_unique<RawWorker>(daemon_->Connect());
    const grpc::Status status = worker->Attach();
    refused += !status.ok();
    if (!status.ok()) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(status.error_message(), testing::AllOf(testing::HasSubstr("of 40 on this node"),
                                                         testing::HasSubstr("retry later")));
    }
    flood.push_back(std::move(worker));
  }
  EXPECT_EQ(refused, 70);  // half of an equal share is kept for the other tenant
  RawWorker other(daemon_->Connect());
  v1::Hello hello = RawWorker::GoodHello();
  hello.set_tenant_token("sesame");
  ASSERT_TRUE(other.Attach(hello).ok());
  NewSequence(other, 40);
  flood.clear();
  // All of them are gone, and everything they held is released.
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  v1::StatsResponse stats;
  do {
    grpc::ClientContext context;
    stats.Clear();
    ASSERT_TRUE(admin->NodeStats(&context, {}, &stats).ok());
  } while (stats.sessions() > 1 && std::chrono::steady_clock::now() < deadline);
  EXPECT_EQ(stats.sessions(), 1u);
  EXPECT_EQ(stats.tenants(0).used_bytes(), 0u);
  EXPECT_TRUE(RawWorker(daemon_->Connect()).Attach().ok());
}

// As many calls wait for memory as a tenant of two may have. gRPC has half as many threads for
// streams as there are cores.
TEST_F(Hostile, ATenantThatWaitsForMemoryKeepsNobodyElseWaiting) {
  Start({.flags = {"--tail-extent-bytes=16MiB", "--pin-limit-ms=60000"},
         .config_json = R"({"tenants": [{"name": "a", "hard_limit_bytes": 33554432},
                                        {"name": "b", "token": "sesame"}]})"});
  std::vector<std::unique_ptr<RawWorker>> workers;
  std::vector<std::uint64_t> sequences;
  for (int i = 0; i < 15; ++i) {
    workers.push_back(Worker());
    sequences.push_back(NewSequence(*workers.back(), 1500));  // 1.5 MiB
  }
  // A reader that never advances, pinned before the offload that makes room.
  const auto mapping = fakes::RawMapping::Map(*workers.front());
  ASSERT_NE(mapping, nullptr);
  mapping->control().readers[0].word.store(shm::PinWord(1));
  std::atomic<int> answered{0};
  std::vector<std::thread> waiting;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    waiting.emplace_back([&, i] {
      workers[i]->OpenTails({sequences[i]});
      ++answered;
    });
  }
  RawWorker other(daemon_->Connect());
  v1::Hello hello = RawWorker::GoodHello();
  hello.set_tenant_token("sesame");
  int attached = 0;
  while (answered == 0 && attached < 200 && other.Attach(hello).ok()) ++attached;
  EXPECT_EQ(attached, 200) << "in the time in which the first of them was answered";
  daemon_->Kill(SIGKILL);
  for (std::thread& thread : waiting) thread.join();
}

}  // namespace
}  // namespace tessera
