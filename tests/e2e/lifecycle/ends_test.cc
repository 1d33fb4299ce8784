// How sessions end, and how the daemon counts and logs it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <regex>
#include <string>

#include "daemon/base/strings.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/http_get.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

constexpr int kExits = 100;

class Ends : public testing::Test {
 protected:
  Ends()
      : daemon_(
            DaemonProcess::Start({.flags = {"--metrics=127.0.0.1:0", "--drain-limit-ms=300"}})) {
    std::smatch match;
    const std::string log = daemon_->Log();
    if (std::regex_search(log, match, std::regex("port=([0-9]+)"))) {
      port_ = static_cast<std::uint16_t>(std::stoi(match[1]));
    }
  }

  std::int64_t Count(const std::string& reason) const {
    const std::string metrics = fakes::HttpGet(port_, "/metrics");
    std::smatch match;
    const std::regex sample(
        Concat("tessera_session_ends_total\\{reason=\"", reason, "\"\\} ([0-9]+)"));
    return std::regex_search(metrics, match, sample) ? std::stoll(match[1]) : -1;
  }
  // Waits until so many sessions have ended, for whatever reason.
  void AwaitEnds(std::int64_t count) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (Count("closed") + Count("lost") + Count("refused") + Count("drained") < count) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    }
  }
  // Waits for a line of the log that contains `text`.
  std::string AwaitLog(const std::string& text) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::string log;
    do {
      log = daemon_->Log();
    } while (log.find(text) == std::string::npos && std::chrono::steady_clock::now() < deadline);
    return log;
  }

  const std::unique_ptr<DaemonProcess> daemon_;
  std::uint16_t port_ = 0;
};

TEST_F(Ends, AWorkerThatLeavesCountsAsClosedWhateverItsStreamDoes) {
  const auto channel = daemon_->Connect();
  for (int i = 0; i < kExits; ++i) {
    RawWorker worker(channel);
    ASSERT_TRUE(worker.Attach().ok());
    worker.LeaveAndBreak();
  }
  ASSERT_NO_FATAL_FAILURE(AwaitEnds(kExits));
  EXPECT_EQ(Count("closed"), kExits);
  EXPECT_EQ(Count("lost"), 0);
}

TEST_F(Ends, EachReasonIsCountedApart) {
  for (const char* reason : {"closed", "lost", "refused", "drained"}) EXPECT_EQ(Count(reason), 0);
  RawWorker half_closing(daemon_->Connect());
  ASSERT_TRUE(half_closing.Attach().ok());
  EXPECT_TRUE(half_closing.Leave().ok());
  ASSERT_NO_FATAL_FAILURE(AwaitEnds(1));
  EXPECT_EQ(Count("closed"), 1);

  RawWorker breaking(daemon_->Connect());
  ASSERT_TRUE(breaking.Attach().ok());
  breaking.Break();
  ASSERT_NO_FATAL_FAILURE(AwaitEnds(2));
  EXPECT_EQ(Count("lost"), 1);

  RawWorker repeating(daemon_->Connect());
  ASSERT_TRUE(repeating.Attach().ok());
  EXPECT_EQ(repeating.GreetAgain().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  ASSERT_NO_FATAL_FAILURE(AwaitEnds(3));
  EXPECT_EQ(Count("refused"), 1);

  RawWorker staying(daemon_->Connect());
  ASSERT_TRUE(staying.Attach().ok());
  daemon_->Kill(SIGTERM);
  EXPECT_EQ(staying.AwaitEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
  EXPECT_THAT(daemon_->Log(), HasSubstr("reason=drained tenant=default worker=raw"));
}

TEST_F(Ends, TheLogNamesTenantWorkerAgeSequencesAndBytes) {
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  v1::RegisterModelRequest request;
  *request.mutable_model() = fakes::SmallModel();
  v1::RegisterModelResponse model;
  ASSERT_TRUE(worker.RegisterModel(request, &model).ok());
  v1::CreateSequenceRequest create;
  create.set_model_id(model.model_id());
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(worker.CreateSequence(create, &created).ok());
  v1::AppendRequest append;
  append.set_sequence_id(created.sequence_id());
  *append.mutable_key() = fakes::SmallRows(2, 64, 1);
  *append.mutable_value() = fakes::SmallRows(2, 64, 2);
  v1::AppendResponse appended;
  const grpc::Status status = worker.Append(append, &appended);
  ASSERT_TRUE(status.ok()) << status.error_message();
  // A fork shares the tiles of its parent; they are freed once.
  v1::ForkRequest fork;
  fork.set_parent_id(created.sequence_id());
  v1::ForkResponse forked;
  ASSERT_TRUE(worker.Fork(fork, &forked).ok());
  worker.Leave();
  // 2 layers x 2 heads x 64 tokens x 64 channels x 2 (key and value) x 2 bytes.
  EXPECT_THAT(AwaitLog("session ended"),
              ContainsRegex("session ended session=[0-9]+ reason=closed tenant=default worker=raw "
                            "age_seconds=[0-9.e-]+ sequences=2 freed_bytes=65536"));
}

}  // namespace
}  // namespace tessera
