// The transport of MappedDaemon: messages are function calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "client/rpc/transport.h"
#include "tests/fakes/daemon/mapped_daemon.h"

namespace tessera::fakes {

// Messages from the daemon to one worker.
struct MappedDaemon::Pipe {
  void Push(const v1::AttachResponse& message);
  void End(const absl::Status& why);

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<v1::AttachResponse> messages;
  bool ended = false;
  absl::Status why;
};

class MappedDaemon::FakeStream final : public client::AttachStream {
 public:
  explicit FakeStream(MappedDaemon& daemon) : daemon_(daemon) {}

  bool Write(const v1::AttachRequest& message) override;
  bool Read(v1::AttachResponse& message) override;
  void FinishWriting() override;
  absl::Status Finish() override;
  void Cancel() override { pipe_->End(absl::CancelledError("cancelled")); }

 private:
  MappedDaemon& daemon_;
  const std::shared_ptr<Pipe> pipe_ = std::make_shared<Pipe>();
  std::shared_ptr<Session> session_;  // after Hello
};

class MappedDaemon::FakeSource final : public client::DescriptorSource {
 public:
  FakeSource(MappedDaemon& daemon, std::shared_ptr<Session> session)
      : daemon_(daemon), session_(std::move(session)) {}
  absl::StatusOr<client::Descriptor> Fetch(shm::DescriptorKind kind, std::uint32_t index) override;
  void SignalWake() override { daemon_.wakes_.fetch_add(1); }
  void Shutdown() override { down_.store(true); }

 private:
  MappedDaemon& daemon_;
  const std::shared_ptr<Session> session_;
  std::atomic<bool> down_{false};
};

class MappedDaemon::FakeTransport final : public client::Transport {
 public:
  explicit FakeTransport(MappedDaemon& daemon) : daemon_(daemon) {}

  absl::StatusOr<std::unique_ptr<client::AttachStream>> OpenAttach(Clock::Duration) override;
  absl::StatusOr<std::unique_ptr<client::DescriptorSource>> OpenDescriptors(
      const v1::Welcome& welcome) override;
  absl::Status Call(const v1::RegisterModelRequest&, v1::RegisterModelResponse&,
                    Clock::Duration) override;
  absl::Status Call(const v1::CreateSequenceRequest&, v1::CreateSequenceResponse&,
                    Clock::Duration) override;
  absl::Status Call(const v1::ForkRequest&, v1::ForkResponse&, Clock::Duration) override;
  absl::Status Call(const v1::TruncateRequest&, v1::TruncateResponse&, Clock::Duration) override;
  absl::Status Call(const v1::OffloadRequest&, v1::OffloadResponse&, Clock::Duration) override;
  absl::Status Call(const v1::RestoreRequest&, v1::RestoreResponse&, Clock::Duration) override;
  absl::Status Call(const v1::HandoverRequest&, v1::HandoverResponse&, Clock::Duration) override;
  absl::Status Call(const v1::FreeRequest&, v1::FreeResponse&, Clock::Duration) override;
  absl::Status Call(const v1::AppendRequest&, v1::AppendResponse&, Clock::Duration) override;
  absl::Status Call(const v1::CompressRequest&, v1::CompressResponse&, Clock::Duration) override;
  absl::Status Call(const v1::ObserveRequest&, v1::ObserveResponse&, Clock::Duration) override;
  absl::Status Call(const v1::SelectRequest&, v1::SelectResponse&, Clock::Duration) override;
  absl::Status Call(const v1::AttendRequest&, v1::AttendResponse&, Clock::Duration) override;
  // MappedDaemon does not publish prefixes.
  absl::Status Call(const v1::ReadRequest&, v1::ReadResponse&, Clock::Duration) override {
    return absl::UnimplementedError("the fake daemon decodes no rows");
  }
  absl::Status Call(const v1::PublishRequest&, v1::PublishResponse&, Clock::Duration) override {
    return absl::UnimplementedError("this daemon has no prefixes");
  }
  absl::Status Call(const v1::MatchRequest&, v1::MatchResponse&, Clock::Duration) override {
    return absl::UnimplementedError("this daemon has no prefixes");
  }
  absl::Status Call(const v1::DescribeRequest&, v1::DescribeResponse&, Clock::Duration) override;
  absl::Status Call(const v1::StatsRequest&, v1::StatsResponse&, Clock::Duration) override;

 private:
  MappedDaemon& daemon_;
};

class MappedDaemon::FakeConnector final : public client::Connector {
 public:
  FakeConnector(MappedDaemon& daemon, bool local) : daemon_(daemon), local_(local) {}
  absl::StatusOr<std::unique_ptr<client::Transport>> NewTransport() override {
    return std::make_unique<FakeTransport>(daemon_);
  }
  bool local() const override { return local_; }
  const std::string& address() const override { return address_; }

 private:
  MappedDaemon& daemon_;
  const bool local_;
  const std::string address_ = "fake:daemon";
};

}  // namespace tessera::fakes
