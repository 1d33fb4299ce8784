// The state that a worker and its handles share: the current session, the lease thread that holds
// it, the models to register again after a reattachment, and the worker's sequences.
//
//   lease thread:   attach ──▶ read the stream until it ends ──▶ unmap ──▶ (attach again, if asked)
//
// Every attempt to attach runs on the lease thread. Attach and Reattach place an order and wait.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "client/rpc/transport.h"
#include "client/sequence/sequence_state.h"
#include "client/session/bound_model.h"
#include "client/session/environment.h"
#include "client/session/session.h"
#include "daemon/base/mutex.h"
#include "daemon/base/rate_limit.h"
#include "tessera/model.h"
#include "tessera/options.h"

namespace tessera::client {

class Core {
 public:
  Core(AttachOptions options, const Environment& environment, std::unique_ptr<Connector> connector);
  ~Core();

  // The first attachment, with a single attempt.
  absl::Status Attach();
  absl::StatusOr<ReattachReport> Reattach();
  // Ends the session and the lease thread. Idempotent.
  void Detach();

  // UNAVAILABLE with the reason if the worker is not attached.
  absl::StatusOr<std::shared_ptr<Session>> session() const;
  const AttachOptions& options() const { return options_; }
  // Calls AttachOptions::on_warning, or prints to stderr.
  void Warn(std::string_view warning);

  absl::StatusOr<std::shared_ptr<ModelRecord>> RegisterModel(const ModelGeometry& geometry);
  void AddSequence(const std::shared_ptr<SequenceState>& sequence);

 private:
  enum class Order { kNone, kOnce, kPersist };
  struct Outcome {
    absl::Status status;
    ReattachReport report;
  };

  // Waits until the order is done, and cancels an attempt that takes longer than `patience`.
  Outcome Place(Order order, Clock::Duration patience);

  // Tells the daemon that the worker leaves, and waits a while for the end of the lease.
  void SayGoodbye(const std::shared_ptr<Session>& session);

  // On the lease thread.
  void RunLease();
  Outcome AttachNow(Order order);
  absl::StatusOr<v1::Welcome> Greet(Transport& transport, std::shared_ptr<AttachStream>& stream);
  absl::StatusOr<std::unique_ptr<MappedMemory>> OpenMappedMemory(Transport& transport,
                                                                 const v1::Welcome& welcome);
  absl::Status OpenSession(ReattachReport& report);
  absl::Status BindModels(Session& session);
  v1::Hello MakeHello();
  void MarkGone(const v1::Welcome& welcome, ReattachReport& report);
  bool Pause(Clock::Duration duration);
  void LoseSession(const absl::Status& why);

  const AttachOptions options_;
  const std::unique_ptr<Connector> connector_;
  SystemClock system_clock_;
  std::unique_ptr<Sleeper> system_sleeper_;
  Environment environment_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  Order order_ TESSERA_GUARDED_BY(mutex_) = Order::kNone;
  std::uint64_t orders_placed_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t orders_done_ TESSERA_GUARDED_BY(mutex_) = 0;
  Outcome outcome_ TESSERA_GUARDED_BY(mutex_);  // of the last order
  std::shared_ptr<AttachStream> opening_ TESSERA_GUARDED_BY(mutex_);
  std::shared_ptr<Session> session_ TESSERA_GUARDED_BY(mutex_);
  absl::Status lost_ TESSERA_GUARDED_BY(mutex_) = absl::UnavailableError("not attached");
  std::uint64_t instance_ TESSERA_GUARDED_BY(mutex_) = 0;  // of the last daemon
  std::uint64_t next_serial_ TESSERA_GUARDED_BY(mutex_) = 1;
  std::vector<std::shared_ptr<ModelRecord>> models_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SequenceState>> sequences_ TESSERA_GUARDED_BY(mutex_);
  std::size_t sequences_at_last_sweep_ TESSERA_GUARDED_BY(mutex_) = 0;

  LogRateLimit warnings_{std::chrono::minutes(1)};  // to stderr

  Mutex join_mutex_;
  std::thread lease_ TESSERA_GUARDED_BY(join_mutex_);
};

}  // namespace tessera::client
