#include "client/session/session.h"

#include <chrono>
#include <utility>

#include "client/error/error_info.h"
#include "daemon/base/strings.h"

namespace tessera::client {

Session::Session(Options options, v1::Welcome welcome, std::unique_ptr<Transport> transport,
                 std::shared_ptr<AttachStream> stream, std::unique_ptr<MappedMemory> mapped)
    : options_(std::move(options)),
      welcome_(std::move(welcome)),
      transport_(std::move(transport)),
      stream_(std::move(stream)),
      mapped_memory_(std::move(mapped)) {}

absl::Status Session::status() const {
  if (!lost_.load(std::memory_order_acquire)) return absl::OkStatus();
  MutexLock lock(mutex_);
  return reason_;
}

absl::Status Session::Explain(absl::Status status) const {
  if (status.ok()) return status;
  if (absl::Status lost = this->status(); !lost.ok()) return lost;
  if (absl::IsUnavailable(status) && draining()) {
    return WithCause(std::move(status), ErrorCause::kDraining);
  }
  if (!absl::IsUnauthenticated(status)) return status;
  // A session that the daemon no longer knows has just ended; the stream will report it, too.
  return WithCause(
      absl::UnavailableError(Concat("the lease of ", id().ToString(), " at ", options_.address,
                                    " has ended: ", AsStringView(status.message()))),
      ErrorCause::kLeaseLost);
}

std::uint64_t Session::NewRequest() {
  MutexLock lock(mutex_);
  const std::uint64_t id = next_request_++;
  requests_[id] = std::nullopt;
  return id;
}

absl::StatusOr<v1::AttachResponse> Session::Ask(v1::AttachRequest request, std::uint64_t id) {
  bool written = false;
  {
    MutexLock lock(write_mutex_);
    written = !writing_finished_ && stream_->Write(request);
  }
  const Clock::TimePoint deadline = SystemClock().Now() + options_.rpc_timeout;
  MutexLock lock(mutex_);
  bool in_time = true;
  // A stream that accepts no more messages has ended: the lease thread will report why.
  while (reason_.ok() && !requests_[id].has_value() && in_time) {
    in_time = answered_.WaitUntil(mutex_, deadline);
  }
  std::optional<v1::AttachResponse> answer = std::move(requests_[id]);
  requests_.erase(id);
  if (answer.has_value()) return *std::move(answer);
  if (!reason_.ok()) return reason_;
  if (!written) return absl::UnavailableError("the Attach stream accepts no more requests");
  return absl::DeadlineExceededError(
      Concat("the daemon has not answered on the Attach stream within ",
             std::chrono::duration<double>(options_.rpc_timeout).count(), " s"));
}

absl::StatusOr<v1::TailsOpened> Session::OpenTails(std::span<const SequenceId> sequences) {
  v1::AttachRequest request;
  v1::OpenTails& asked = *request.mutable_open_tails();
  const std::uint64_t id = NewRequest();
  asked.set_request_id(id);
  for (SequenceId sequence : sequences) asked.add_sequence_ids(sequence.value());
  absl::StatusOr<v1::AttachResponse> response = Ask(std::move(request), id);
  if (!response.ok()) return response.status();
  v1::TailsOpened& opened = *response->mutable_tails_opened();
  if (opened.code() != 0) {
    return Explain(absl::Status(static_cast<absl::StatusCode>(opened.code()), opened.error()));
  }
  if (opened.tails_size() != static_cast<int>(sequences.size())) {
    return absl::InternalError(Concat("the daemon opened ", opened.tails_size(),
                                      " tails; requested were ", sequences.size()));
  }
  return std::move(opened);
}

absl::StatusOr<v1::TailsClosed> Session::CloseTails(std::span<const SequenceId> sequences) {
  v1::AttachRequest request;
  v1::CloseTails& asked = *request.mutable_close_tails();
  const std::uint64_t id = NewRequest();
  asked.set_request_id(id);
  for (SequenceId sequence : sequences) asked.add_sequence_ids(sequence.value());
  absl::StatusOr<v1::AttachResponse> response = Ask(std::move(request), id);
  if (!response.ok()) return response.status();
  v1::TailsClosed& closed = *response->mutable_tails_closed();
  if (closed.code() != 0) {
    return Explain(absl::Status(static_cast<absl::StatusCode>(closed.code()), closed.error()));
  }
  if (closed.tokens_size() != static_cast<int>(sequences.size())) {
    return absl::InternalError(Concat("the daemon closed ", closed.tokens_size(),
                                      " tails; requested were ", sequences.size()));
  }
  return std::move(closed);
}

absl::Status Session::ReadUntilEnd() {
  v1::AttachResponse message;
  while (stream_->Read(message)) Handle(std::move(message));
  {
    // Finish must not run concurrently with a write.
    MutexLock lock(write_mutex_);
    writing_finished_ = true;
  }
  return stream_->Finish();
}

void Session::Handle(v1::AttachResponse message) {
  switch (message.message_case()) {
    case v1::AttachResponse::kTailsOpened: {
      const std::uint64_t request = message.tails_opened().request_id();
      return Answer(request, std::move(message));
    }
    case v1::AttachResponse::kTailsClosed: {
      // Here, in order: the next answer may reuse the index of a dropped extent.
      if (mapped_memory_ != nullptr) {
        for (std::uint32_t extent : message.tails_closed().released_extents()) {
          mapped_memory_->tails().Release(extent);
        }
      }
      const std::uint64_t request = message.tails_closed().request_id();
      return Answer(request, std::move(message));
    }
    case v1::AttachResponse::kPoolChanged:
      if (mapped_memory_ != nullptr) mapped_memory_->UnmapRemovedExtents();
      return;
    case v1::AttachResponse::kDraining:
      draining_.store(true, std::memory_order_relaxed);
      if (options_.on_draining) {
        options_.on_draining(std::chrono::milliseconds(message.draining().limit_ms()));
      }
      return;
    default:
      return;  // sent by a newer daemon, not requested by this client
  }
}

void Session::Answer(std::uint64_t id, v1::AttachResponse message) {
  MutexLock lock(mutex_);
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;  // the caller has stopped waiting
  it->second = std::move(message);
  answered_.NotifyAll();
}

void Session::Lose(const absl::Status& reason) {
  {
    MutexLock lock(mutex_);
    if (!reason_.ok()) return;
    reason_ = reason;
    lost_.store(true, std::memory_order_release);
    answered_.NotifyAll();
  }
  if (mapped_memory_ != nullptr) mapped_memory_->Close();
}

void Session::FinishWriting() {
  MutexLock lock(write_mutex_);
  if (std::exchange(writing_finished_, true)) return;
  v1::AttachRequest request;
  request.mutable_leave();
  (void)stream_->Write(request);  // a stream that has ended needs no goodbye
  stream_->FinishWriting();
}

}  // namespace tessera::client
