// One attachment, from Welcome to the loss of the lease. It carries both transports: RPCs with the
// session's key, requests on the Attach stream and, if memory is mapped, the MappedMemory.
//
// Thread-safe. Only the lease thread reads the stream and declares the session lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "client/mapped/mapped_memory.h"
#include "client/rpc/transport.h"
#include "client/session/environment.h"
#include "daemon/base/mutex.h"

namespace tessera::client {

class Session {
 public:
  struct Options {
    std::uint64_t serial;  // unique among this worker's sessions; never 0
    std::string address;
    Clock::Duration rpc_timeout;
    const Environment* environment;
    std::function<void(Clock::Duration limit)> on_draining;
  };
  // `door` is null if no memory is mapped.
  Session(Options options, v1::Welcome welcome, std::unique_ptr<Transport> transport,
          std::shared_ptr<AttachStream> stream, std::unique_ptr<MappedMemory> mapped);

  std::uint64_t serial() const { return options_.serial; }
  SessionId id() const { return SessionId(welcome_.session().session_id()); }
  const v1::Welcome& welcome() const { return welcome_; }
  const Environment& environment() const { return *options_.environment; }
  bool draining() const { return draining_.load(std::memory_order_relaxed); }
  MappedMemory* mapped_memory() const { return mapped_memory_.get(); }

  // OK while the lease is held; else UNAVAILABLE with the reason.
  absl::Status status() const;

  // Fills in the session key and sends the request. UNAVAILABLE once the lease is lost, whatever
  // the daemon answered. `wait` is added to the timeout, for calls that may wait in the daemon.
  template <typename Request, typename Response>
  absl::Status Call(Request& request, Response& response, Clock::Duration wait = {}) {
    if (absl::Status lost = status(); !lost.ok()) return lost;
    *request.mutable_session() = welcome_.session();
    return Explain(transport_->Call(request, response, options_.rpc_timeout + wait));
  }

  // Opens or closes all tails or none. Answers are in the order of the request.
  absl::StatusOr<v1::TailsOpened> OpenTails(std::span<const SequenceId> sequences);
  absl::StatusOr<v1::TailsClosed> CloseTails(std::span<const SequenceId> sequences);

  // On the lease thread: reads until the stream ends, and returns why it ended.
  absl::Status ReadUntilEnd();
  // On the lease thread: unmaps everything; later calls answer `reason`.
  void Lose(const absl::Status& reason);
  // Leaves: says so to the daemon and ends the writing side; the daemon then ends the stream.
  void FinishWriting();
  void Cancel() { stream_->Cancel(); }

 private:
  absl::StatusOr<v1::AttachResponse> Ask(v1::AttachRequest request, std::uint64_t id);
  std::uint64_t NewRequest();
  void Handle(v1::AttachResponse message);
  void Answer(std::uint64_t id, v1::AttachResponse message);
  absl::Status Explain(absl::Status status) const;

  const Options options_;
  const v1::Welcome welcome_;
  const std::unique_ptr<Transport> transport_;
  const std::shared_ptr<AttachStream> stream_;
  const std::unique_ptr<MappedMemory> mapped_memory_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> lost_{false};

  Mutex write_mutex_;  // one writer of the stream at a time
  bool writing_finished_ TESSERA_GUARDED_BY(write_mutex_) = false;

  mutable Mutex mutex_;
  CondVar answered_;
  absl::Status reason_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t next_request_ TESSERA_GUARDED_BY(mutex_) = 1;
  // Pending requests; nullopt until the answer has arrived.
  std::unordered_map<std::uint64_t, std::optional<v1::AttachResponse>> requests_
      TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::client
