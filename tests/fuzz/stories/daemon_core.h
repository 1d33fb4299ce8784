// The serving layer on a small daemon in this process: no sockets, a manual clock, and no thread
// except the one that runs jobs for a blocking call. There are two tenants. Inputs act as one of
// them. The other has a sequence that inputs must neither change nor read.
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

// An Attach stream without a wire: the test supplies what the daemon reads and collects what it
// writes.
class FakeStream final
    : public grpc::ServerCallbackReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit FakeStream(const serving::AttachContext& door);
  ~FakeStream() override;

  // Returns false if the daemon does not read: the stream has ended, or too much is unread.
  bool Send(const v1::AttachRequest& message);
  // Closes the stream from the worker's side, as if its process ended.
  void HangUp();
  bool ended() const { return finished_; }
  // Messages written since the last call.
  std::vector<v1::AttachResponse> Take() { return std::exchange(written_, {}); }

 private:
  void Finish(grpc::Status status) override;
  void SendInitialMetadata() override {}
  void Read(grpc::ByteBuffer* message) override { wanted_ = message; }
  void Write(const grpc::ByteBuffer* message, grpc::WriteOptions) override;
  void WriteAndFinish(const grpc::ByteBuffer* message, grpc::WriteOptions options,
                      grpc::Status status) override;
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}
  // Completes the daemon's pending writes. Not called under the daemon's locks.
  void Settle();

  grpc::CallbackServerContext context_;
  grpc::ByteBuffer* wanted_ = nullptr;
  bool writing_ = false;
  bool finished_ = false;
  bool read_ended_ = false;
  std::vector<v1::AttachResponse> written_;
  serving::AttachReactor* reactor_ = nullptr;
};

// A Match call. The daemon may answer it at once, later or never.
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

// An honest worker with a sequence whose rows must not change.
class Neighbour {
 public:
  Neighbour(DaemonCore& core, const std::string& token);
  // Aborts if the sequence reads differently than at the start. Closes the stream.
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

  // `crowded`: adds an honest worker of the input's tenant.
  explicit DaemonCore(bool crowded = false);
  // Ends everything. Aborts if something is left, or if a neighbour's rows have changed.
  ~DaemonCore();

  serving::WorkerService& worker() { return parts_.worker(); }
  serving::AdminService& admin() { return *admin_; }
  serving::Services& services() { return parts_.services(); }
  cache::Node& node() { return parts_.node(); }
  cache::Tenant& mine() { return *node().tenants()[0]; }
  StepScheduler& scheduler() { return scheduler_; }
  std::unique_ptr<FakeStream> Attach() {
    return std::make_unique<FakeStream>(parts_.mapped_memory());
  }
  // Advances time and runs what the watcher would run.
  void Pass(Clock::Duration time);

  // The other tenant's sequence and session, as targets of attacks.
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
