// The serving layer on a small daemon in this process: no socket, no thread but the one that runs
// what a blocking call waits for, and a clock that stands. Two tenants: what inputs do is done as
// one of them; the other has a sequence that nothing may touch or show.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/serving/rpc/admin_service.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fuzz/stories/daemon_parts.h"
#include "tests/fuzz/stories/step_scheduler.h"

namespace tessera::fuzz {

// An Attach stream without a wire: what the daemon reads is handed to it, what it writes is kept.
class FakeStream final
    : public grpc::ServerCallbackReaderWriter<v1::AttachRequest, v1::AttachResponse> {
 public:
  explicit FakeStream(const serving::AttachDoor& door);
  ~FakeStream() override;

  // False where the daemon does not read: the stream has ended, or too much is unread.
  bool Send(const v1::AttachRequest& message);
  // The worker hangs up, or its process is gone.
  void HangUp();
  bool ended() const { return finished_; }
  // What was written since the last call.
  std::vector<v1::AttachResponse> Take() { return std::exchange(written_, {}); }

 private:
  void Finish(grpc::Status status) override;
  void SendInitialMetadata() override {}
  void Read(v1::AttachRequest* message) override { wanted_ = message; }
  void Write(const v1::AttachResponse* message, grpc::WriteOptions) override;
  void WriteAndFinish(const v1::AttachResponse* message, grpc::WriteOptions options,
                      grpc::Status status) override;
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}
  // Tells the daemon what has become of its writes; outside of its locks.
  void Settle();

  grpc::CallbackServerContext context_;
  v1::AttachRequest* wanted_ = nullptr;
  bool writing_ = false;
  bool finished_ = false;
  bool read_ended_ = false;
  std::vector<v1::AttachResponse> written_;
  grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse>* reactor_ = nullptr;
};

// A Match call, which may be answered at once, later, or never.
class FakeMatch final : public grpc::ServerCallbackUnary {
 public:
  FakeMatch(serving::WorkerService& service, const v1::MatchRequest& request);
  ~FakeMatch() override;
  bool finished() const { return finished_; }
  const grpc::Status& status() const { return status_; }
  const v1::MatchResponse& response() const { return response_; }

 private:
  void Finish(grpc::Status status) override;
  void SendInitialMetadata() override {}
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}

  grpc::CallbackServerContext context_;
  const v1::MatchRequest request_;
  v1::MatchResponse response_;
  grpc::Status status_;
  bool finished_ = false;
  grpc::ServerUnaryReactor* reactor_ = nullptr;
};

class DaemonCore;

// An honest worker with a sequence, whose rows must stay what they are.
class Neighbour {
 public:
  Neighbour(DaemonCore& core, const std::string& token);
  // Aborts where its sequence reads otherwise than in the beginning; hangs up.
  ~Neighbour();
  std::uint64_t sequence() const { return sequence_; }
  std::uint64_t session() const { return key_.session_id(); }

 private:
  std::string Attend();

  DaemonCore& core_;
  std::unique_ptr<FakeStream> stream_;
  v1::SessionKey key_;
  std::uint64_t sequence_ = 0;
  std::string output_;
};

class DaemonCore {
 public:
  static constexpr std::uint64_t kPoolExtent = 1 << 20;
  static constexpr std::uint64_t kDirectoryExtent = 512 << 10;
  static constexpr std::uint64_t kStaging = 64 << 10;

  // `crowded`: an honest worker of my tenant is there, too.
  explicit DaemonCore(bool crowded = false);
  // Everything has ended: aborts where something is left, or where rows of neighbours are not what
  // they were.
  ~DaemonCore();

  serving::WorkerService& worker() { return parts_.worker(); }
  serving::AdminService& admin() { return *admin_; }
  serving::Services& services() { return parts_.services(); }
  cache::Node& node() { return parts_.node(); }
  cache::Tenant& mine() { return *node().tenants()[0]; }
  StepScheduler& scheduler() { return scheduler_; }
  std::unique_ptr<FakeStream> Attach() { return std::make_unique<FakeStream>(parts_.door()); }
  // As the watcher would after a while.
  void Pass(Clock::Duration time);

  // The other tenant's sequence and session, for whoever wants to reach them.
  std::uint64_t foreign_sequence() const { return foreign_->sequence(); }
  std::uint64_t foreign_session() const { return foreign_->session(); }
  // Whether the bytes hold one of the other tenant's rows.
  static bool HoldsForeign(std::string_view bytes);

 private:
  DaemonParts::Options PartsOptions();

  FakeClock clock_;
  StepScheduler scheduler_;
  DaemonParts parts_;
  std::unique_ptr<serving::AdminService> admin_;
  std::unique_ptr<Neighbour> foreign_;
  std::unique_ptr<Neighbour> honest_;
};

}  // namespace tessera::fuzz
