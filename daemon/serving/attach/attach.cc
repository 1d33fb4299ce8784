#include "daemon/serving/attach/attach.h"

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"
#include "daemon/serving/attach/hello.h"
#include "daemon/serving/call/peer.h"
#include "daemon/serving/call/resident.h"
#include "daemon/serving/call/status.h"
#include "proto/shm/layout.h"

namespace tessera::serving {

namespace {

constexpr int kMaxTailsPerRequest = 4096;
// Reading from the stream pauses while this many answers are unread.
constexpr std::size_t kMaxUnread = 8;

// The reactor of one stream. It lives from the start of the call to OnDone. Connections refer to it
// through `Link`, which OnDone disconnects, so that a push to a finished stream is dropped.
class Reactor final : public AttachStream {
 public:
  Reactor(const AttachContext& door, grpc::CallbackServerContext* context)
      : door_(door), context_(context), begun_(door.services->clock->Now()) {
    if (door_.ungreeted != nullptr) door_.ungreeted->Add(*context_, begun_);
    ReadNext();
  }

  void OnMessage(const absl::Status& arrived) override {
    if (absl::IsCancelled(arrived)) {
      CountGreeting(absl::StatusCode::kCancelled);
      return Finished(
          context_->IsCancelled() ? metrics::SessionEnd::kLost : metrics::SessionEnd::kClosed,
          absl::OkStatus());
    }
    if (arrived.ok() && session_ != nullptr &&
        (message().has_open_tails() || message().has_close_tails())) {
      return WorkOnTails();
    }
    if (arrived.ok() && session_ != nullptr && message().has_leave()) {
      return Finished(metrics::SessionEnd::kClosed, absl::OkStatus());
    }
    v1::AttachResponse welcome;
    const absl::Status status = arrived.ok() ? Handle(welcome) : arrived;
    CountGreeting(status.code());
    if (!status.ok() && session_ == nullptr) CountRefusal(status);
    if (absl::IsPermissionDenied(status) && door_.token_delay != nullptr) return Delay(status);
    HasGreeted();
    if (!status.ok()) return Finished(metrics::SessionEnd::kRefused, status);
    // Read first: gRPC drops a message that arrives with the end of the stream, unless a read waits
    // for it. That message may be Leave.
    const bool goes_on = ReadOn();
    Write(std::move(welcome));
    // OnCancel may have run concurrently, before there was a session to end.
    if (!goes_on) Finished(metrics::SessionEnd::kLost, absl::OkStatus());
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // OnMessage or OnCancel ends the session
    MutexLock lock(mutex_);
    writes_.pop_front();
    if (finished_) return;
    if (!writes_.empty()) WriteNext(writes_.front());
    if (!reading_ && writes_.size() < kMaxUnread) {
      reading_ = true;
      ReadNext();
    }
  }

  void OnCancel() override {
    {
      // A read in progress ends now, and ends the session: it may have received Leave before.
      MutexLock lock(mutex_);
      cancelled_ = true;
      if (reading_ && !working_) return;
    }
    Finished(metrics::SessionEnd::kLost, absl::OkStatus());
  }

  void OnDone() override {
    link_->Sever();
    HasGreeted();
    delete this;
  }

 private:
  class Link final : public Lease {
   public:
    explicit Link(Reactor* reactor) : reactor_(reactor) {}
    void Push(v1::AttachResponse message) override {
      MutexLock lock(mutex_);
      if (reactor_ != nullptr) reactor_->Write(std::move(message));
    }
    void Cut(const absl::Status& why) override {
      MutexLock lock(mutex_);
      if (reactor_ != nullptr) reactor_->FinishOnce(why);
    }
    void Sever() {
      MutexLock lock(mutex_);
      reactor_ = nullptr;
    }

   private:
    Mutex mutex_;
    Reactor* reactor_ TESSERA_GUARDED_BY(mutex_);
  };

  void Write(v1::AttachResponse message) {
    MutexLock lock(mutex_);
    if (finished_) return;
    // Welcome must be the first message, but others may arrive once the session is registered.
    if (!greeted_ && !message.has_welcome()) {
      early_.push_back(std::move(message));
      return;
    }
    // A PoolChanged that is still waiting covers this one. writes_[0] is already being written.
    const auto same = [&message](const v1::AttachResponse& other) {
      return other.message_case() == message.message_case();
    };
    if (message.has_pool_changed() && writes_.size() > 1 &&
        std::any_of(writes_.begin() + 1, writes_.end(), same)) {
      return;
    }
    writes_.push_back(std::move(message));
    if (writes_.size() == 1) WriteNext(writes_.front());
    if (std::exchange(greeted_, true)) return;
    for (v1::AttachResponse& news : early_) writes_.push_back(std::move(news));
    early_.clear();
  }

  void FinishOnce(const absl::Status& why) {
    {
      MutexLock lock(mutex_);
      if (std::exchange(finished_, true)) return;
      if (writes_.size() > 1) writes_.erase(writes_.begin() + 1, writes_.end());
      why_ = why;
      if (working_) return;  // StopWorking finishes
    }
    Finish(ToGrpc(why));
  }

  // Returns false if the stream is finished.
  bool ReadOn() {
    MutexLock lock(mutex_);
    if (finished_) return false;
    reading_ = cancelled_ || writes_.size() < kMaxUnread;  // a cancelled read ends the session
    if (reading_) ReadNext();
    return true;
  }

  // Handles a tail request on another thread. The next message is read when it is done, so there is
  // at most one at a time.
  void WorkOnTails() {
    bool gone = false;
    {
      MutexLock lock(mutex_);
      gone = finished_;
      working_ = !gone;
    }
    if (gone) return Finished(metrics::SessionEnd::kLost, absl::OkStatus());
    door_.aside([this] {
      message().has_open_tails() ? OpenTails(message().open_tails())
                                 : CloseTails(message().close_tails());
      StopWorking();
    });
  }

  // Must be the last access to this object: the call may be done afterwards.
  void StopWorking() {
    absl::Status why;
    {
      MutexLock lock(mutex_);
      working_ = false;
      reading_ = !finished_ && (cancelled_ || writes_.size() < kMaxUnread);
      if (reading_) ReadNext();
      if (!finished_) return;
      why = why_;
    }
    Finish(ToGrpc(why));
  }

  bool Gone() {
    MutexLock lock(mutex_);
    return finished_ || cancelled_;
  }

  void Finished(metrics::SessionEnd reason, const absl::Status& why) {
    const SessionId id(session_id_.load());
    if (id.valid()) door_.connections->End(id, reason, why);
    FinishOnce(why);
  }

  absl::Status Handle(v1::AttachResponse& welcome) {
    if (message().has_hello()) return Greet(message().hello(), welcome);
    if (session_ == nullptr) {
      return absl::FailedPreconditionError("the first message of Attach must be Hello");
    }
    return absl::InvalidArgumentError("this daemon does not know this kind of Attach message");
  }

  // Refuses a wrong token later. The stream may end before.
  void Delay(const absl::Status& why) {
    bool gone = false;
    {
      MutexLock lock(mutex_);
      reading_ = false;  // so that OnCancel ends the stream
      gone = cancelled_;
    }
    if (gone) return Finished(metrics::SessionEnd::kLost, absl::OkStatus());
    const Clock::Duration wait =
        door_.token_delay->Next(door_.services->clock->Now()) - door_.services->clock->Now();
    refusal_ = std::make_unique<grpc::Alarm>();
    refusal_->Set(std::chrono::system_clock::now() +
                      std::chrono::duration_cast<std::chrono::system_clock::duration>(wait),
                  [link = link_, why](bool due) {
                    if (due) link->Cut(why);
                  });
  }

  void CountRefusal(const absl::Status& why) {
    using Reason = metrics::AttachRefusal;
    Services& services = *door_.services;
    const Reason reason = absl::IsPermissionDenied(why)     ? Reason::kToken
                          : absl::IsResourceExhausted(why)  ? Reason::kLimit
                          : absl::IsUnavailable(why)        ? Reason::kDraining
                          : absl::IsFailedPrecondition(why) ? Reason::kVersion
                                                            : Reason::kHello;
    services.metrics->attach_refused_total.Increment(reason);
    if (door_.refusal_lines == nullptr) return;
    const std::optional<std::uint64_t> unsaid = door_.refusal_lines->Say(services.clock->Now());
    if (!unsaid.has_value()) return;
    const std::string peer = context_->peer();
    const std::optional<PeerCredentials> process = CallerProcess(*context_);
    std::vector<LogField> fields = {{"error", AsStringView(why.message())},
                                    {"like_this_before", *unsaid}};
    if (process.has_value()) {
      fields.push_back({"uid", process->uid});
      fields.push_back({"pid", process->pid});
    } else {
      fields.push_back({"peer", peer});
    }
    services.logger->Log(LogLevel::kWarning, "attach refused", fields);
  }

  void HasGreeted() {
    if (door_.ungreeted != nullptr) door_.ungreeted->Remove(*context_);
  }

  // Counts the stream's first message, and only that one. For the reading callbacks.
  void CountGreeting(absl::StatusCode code) {
    if (std::exchange(greeting_counted_, true)) return;
    door_.rpc->Finished(code, door_.services->clock->Now() - begun_);
  }

  // Opens the session. The caller sends `welcome`.
  absl::Status Greet(const v1::Hello& hello, v1::AttachResponse& welcome) {
    if (session_ != nullptr) {
      return absl::FailedPreconditionError(
          "Hello may be sent only once; this stream is already attached");
    }
    Services& services = *door_.services;
    if (services.draining.load()) {
      return WithCause(absl::UnavailableError("the daemon is draining and accepts no new sessions"),
                       ErrorCause::kDraining);
    }
    if (absl::Status status = CheckHello(hello); !status.ok()) return status;
    if (absl::Status status = services.device->health(); !status.ok()) return status;
    absl::StatusOr<cache::Tenant*> tenant = services.node->TenantByToken(hello.tenant_token());
    if (!tenant.ok()) return tenant.status();
    const std::uint64_t seed = (*tenant)->options().prefix_hash_seed;
    if (absl::Status status = CheckPrefixHash(hello, seed); !status.ok()) return status;
    if (absl::Status status = services.node->AdmitSession(**tenant); !status.ok()) return status;
    cache::Tenant::NewSession asked = {.worker_name = hello.worker_name(),
                                       .group = hello.group(),
                                       .rank = hello.rank(),
                                       .group_size = std::max(1u, hello.group_size()),
                                       .cache_salt = hello.cache_salt()};
    if (hello.pin_limit_ms() != 0) {
      asked.pin_limit = std::chrono::milliseconds(hello.pin_limit_ms());
    }
    absl::StatusOr<std::shared_ptr<cache::SessionState>> session = (*tenant)->OpenSession(asked);
    if (!session.ok()) {
      services.node->SessionEnded(**tenant);
      return session.status();
    }
    tenant_ = *tenant;
    session_ = *std::move(session);
    session_id_.store(session_->id().value());
    FillWelcome(hello, *welcome.mutable_welcome());
    // Register before answering, so that the worker's next call finds the session.
    door_.connections->Opened(*tenant_, session_, link_);
    return absl::OkStatus();
  }

  void FillWelcome(const v1::Hello& hello, v1::Welcome& welcome) {
    const Services& services = *door_.services;
    const cache::Tenant::Options& options = tenant_->options();
    welcome.mutable_session()->set_session_id(session_->id().value());
    welcome.mutable_session()->set_secret(session_->options().secret);
    welcome.set_instance(services.node->instance());
    welcome.set_nonce(session_->options().nonce);
    // Only peers on this node can map memory; workers on TCP use RPC.
    if (IsLocal(*context_)) {
      welcome.set_descriptor_socket(door_.descriptor_socket);
    }
    welcome.set_tenant(tenant_->name());
    const device::Device::Description& device = services.device->description();
    welcome.set_device(device.name);
    if (device.uuid.has_value() && device.uuid->kind != DeviceUuid::Kind::kCpu) {
      welcome.set_device_uuid(device.uuid->bytes.data(), device.uuid->bytes.size());
    }
    welcome.set_device_uuid_text(device.UuidText());
    welcome.set_staging_bytes(options.staging_bytes);
    welcome.set_tail_ring_tiles(options.ring_tiles);
    welcome.set_directory_extent_bytes(options.directory_extent_bytes);
    welcome.set_pool_extent_bytes(options.pool_extent_bytes);
    welcome.set_protocol_version(shm::kProtocolVersion);
    welcome.set_layout_fingerprint(shm::kLayoutFingerprint);
    welcome.set_prefix_hash(std::string(cache::kPrefixHashName));
    welcome.set_prefix_hash_seed(options.prefix_hash_seed);
    welcome.set_max_message_bytes(services.max_message_bytes);
    welcome.set_pin_limit_ms(static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(session_->options().pin_limit)
            .count()));
    const bool same_daemon = hello.previous_instance() == services.node->instance();
    for (std::uint64_t id : hello.sequence_ids()) {
      if (!same_daemon || !tenant_->FindSequence(SequenceId(id)).ok()) {
        welcome.add_gone_sequence_ids(id);
      }
    }
  }

  static absl::StatusOr<std::vector<SequenceId>> Ids(
      const google::protobuf::RepeatedField<std::uint64_t>& ids) {
    if (ids.size() > kMaxTailsPerRequest) {
      return absl::InvalidArgumentError(
          Concat(ids.size(), " sequences in one request; the limit is ", kMaxTailsPerRequest));
    }
    std::vector<SequenceId> result;
    for (std::uint64_t id : ids) result.push_back(SequenceId(id));
    return result;
  }

  using TailPlaces = absl::StatusOr<std::vector<cache::Tenant::TailPlace>>;
  // Keeps all sequences in the pool until all tails are open.
  absl::Status OpenResident(const std::vector<SequenceId>& ids, TailPlaces& places) {
    std::vector<cache::Residence> held;
    for (const SequenceId id : ids) {
      absl::StatusOr<cache::Residence> sequence = FindResident(*tenant_, id);
      if (!sequence.ok()) return sequence.status();
      held.push_back(*std::move(sequence));
    }
    places = tenant_->OpenTails(*session_, ids);
    return places.status();
  }

  void OpenTails(const v1::OpenTails& asked) {
    v1::AttachResponse response;
    v1::TailsOpened& opened = *response.mutable_tails_opened();
    opened.set_request_id(asked.request_id());
    TailPlaces places = std::vector<cache::Tenant::TailPlace>();
    absl::StatusOr<std::vector<SequenceId>> ids = Ids(asked.sequence_ids());
    const absl::Status status = ids.ok() ? RetryWhenPoolFull(
                                               *door_.services, *tenant_, [this] { return Gone(); },
                                               [&] { return OpenResident(*ids, places); })
                                         : ids.status();
    if (!status.ok()) places = status;
    if (!places.ok()) {
      opened.set_code(static_cast<int>(places.status().code()));
      opened.set_error(std::string(AsStringView(places.status().message())));
    } else {
      for (const cache::Tenant::TailPlace& place : *places) {
        v1::TailPlace& tail = *opened.add_tails();
        tail.set_sequence_id(place.sequence.value());
        tail.set_extent(place.tail.extent);
        tail.set_extent_bytes(place.tail.extent_bytes);
        tail.set_offset(place.tail.offset);
        tail.set_commit_slot(place.tail.commit_slot);
        tail.set_generation(place.tail.generation);
        tail.set_tokens(place.tail.tokens);
        tail.set_position_shift(place.tail.position_shift);
      }
    }
    Write(std::move(response));
  }

  void CloseTails(const v1::CloseTails& asked) {
    v1::AttachResponse response;
    v1::TailsClosed& closed = *response.mutable_tails_closed();
    closed.set_request_id(asked.request_id());
    absl::StatusOr<std::vector<SequenceId>> ids = Ids(asked.sequence_ids());
    std::vector<std::uint64_t> tokens;
    const auto close = [&]() -> absl::Status {
      if (!ids.ok()) return ids.status();
      absl::StatusOr<std::vector<std::uint64_t>> held = tenant_->CloseTails(*session_, *ids);
      if (held.ok()) tokens = *std::move(held);
      return held.status();
    };
    const absl::Status status = RetryWhenPoolFull(
        *door_.services, *tenant_, [this] { return Gone(); }, close);
    if (!status.ok()) {
      closed.set_code(static_cast<int>(status.code()));
      closed.set_error(std::string(AsStringView(status.message())));
    }
    for (const std::uint64_t count : tokens) closed.add_tokens(count);
    for (std::uint32_t extent : session_->tails().ReleaseIdle()) {
      closed.add_released_extents(extent);
    }
    Write(std::move(response));
  }

  const AttachContext door_;
  grpc::CallbackServerContext* const context_;
  const Clock::TimePoint begun_;
  const std::shared_ptr<Link> link_ = std::make_shared<Link>(this);
  std::unique_ptr<grpc::Alarm> refusal_;  // of a wrong token
  bool greeting_counted_ = false;         // for the reading callbacks
  // Set by Greet and used by the reading callbacks only; others use session_id_.
  cache::Tenant* tenant_ = nullptr;
  std::shared_ptr<cache::SessionState> session_;
  std::atomic<std::uint64_t> session_id_{0};
  Mutex mutex_;
  std::deque<v1::AttachResponse> writes_ TESSERA_GUARDED_BY(mutex_);
  std::vector<v1::AttachResponse> early_ TESSERA_GUARDED_BY(mutex_);  // until Welcome is written
  bool greeted_ TESSERA_GUARDED_BY(mutex_) = false;
  bool finished_ TESSERA_GUARDED_BY(mutex_) = false;
  bool reading_ TESSERA_GUARDED_BY(mutex_) =
      true;  // a read is in progress, or its message is handled
  bool working_ TESSERA_GUARDED_BY(mutex_) = false;
  bool cancelled_ TESSERA_GUARDED_BY(mutex_) = false;
  absl::Status why_ TESSERA_GUARDED_BY(mutex_);  // set with finished_
};

}  // namespace

AttachReactor* NewAttachReactor(const AttachContext& door, grpc::CallbackServerContext* context) {
  return new Reactor(door, context);
}

}  // namespace tessera::serving
