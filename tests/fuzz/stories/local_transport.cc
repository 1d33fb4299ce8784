#include "tests/fuzz/stories/local_transport.h"

#include <grpcpp/support/server_callback.h>

#include <optional>
#include <utility>

#include "client/mapped/descriptors.h"
#include "daemon/base/check.h"
#include "daemon/base/mutex.h"
#include "tests/fuzz/stories/wire_form.h"

namespace tessera::fuzz {

namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// The daemon's end of an Attach stream, with the guarantees of gRPC: callbacks never run under a
// lock of the wire; reads come one at a time, and so do writes.
class Wire final : public grpc::ServerCallbackReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Wire(const serving::AttachContext& door)
      : reactor_(serving::NewAttachReactor(door, &context_)) {
    BindReactor(reactor_);
  }
  ~Wire() override {
    HangUp();
    v1::AttachResponse unread;
    while (Receive(unread)) {
    }
    reactor_->OnDone();
  }

  // Returns false if the stream has ended.
  bool Send(const v1::AttachRequest& message) {
    {
      MutexLock lock(mutex_);
      while (wanted_ == nullptr && !finished_ && !hung_up_) changed_.Wait(mutex_);
      if (finished_ || hung_up_) return false;
      *std::exchange(wanted_, nullptr) = ToWire(message);
    }
    reactor_->OnReadDone(true);
    TellOfHangUp();
    return true;
  }
  // Returns false if the stream has ended and everything has been read.
  bool Receive(v1::AttachResponse& message) {
    {
      MutexLock lock(mutex_);
      while (!written_.has_value() && !finished_) changed_.Wait(mutex_);
      if (!written_.has_value()) return false;
      message = *std::exchange(written_, std::nullopt);
    }
    reactor_->OnWriteDone(true);
    TellOfHangUp();
    return true;
  }
  void HangUp() {
    {
      MutexLock lock(mutex_);
      hung_up_ = true;
      changed_.NotifyAll();
    }
    TellOfHangUp();
  }
  // Valid once Receive has returned false.
  grpc::Status status() const {
    MutexLock lock(mutex_);
    return status_;
  }

 private:
  void Finish(grpc::Status status) override {
    MutexLock lock(mutex_);
    TESSERA_CHECK(!finished_, "a stream ends once");
    finished_ = true;
    status_ = std::move(status);
    changed_.NotifyAll();
  }
  void SendInitialMetadata() override {}
  void Read(grpc::ByteBuffer* message) override {
    MutexLock lock(mutex_);
    wanted_ = message;
    changed_.NotifyAll();
  }
  void Write(const grpc::ByteBuffer* message, grpc::WriteOptions) override {
    MutexLock lock(mutex_);
    TESSERA_CHECK(!written_.has_value(), "one write at a time");
    written_ = FromWire<v1::AttachResponse>(*message);
    changed_.NotifyAll();
  }
  void WriteAndFinish(const grpc::ByteBuffer* message, grpc::WriteOptions options,
                      grpc::Status status) override {
    Write(message, options);
    Finish(std::move(status));
  }
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}

  // Reports the end once, as a failed read. If a read is being handled, the next read reports it.
  void TellOfHangUp() {
    {
      MutexLock lock(mutex_);
      if (!hung_up_ || wanted_ == nullptr || finished_) return;
      wanted_ = nullptr;
    }
    reactor_->OnReadDone(false);
  }

  grpc::CallbackServerContext context_;
  mutable Mutex mutex_;
  CondVar changed_;
  grpc::ByteBuffer* wanted_ TESSERA_GUARDED_BY(mutex_) = nullptr;
  std::optional<v1::AttachResponse> written_ TESSERA_GUARDED_BY(mutex_);
  bool hung_up_ TESSERA_GUARDED_BY(mutex_) = false;
  bool finished_ TESSERA_GUARDED_BY(mutex_) = false;
  grpc::Status status_ TESSERA_GUARDED_BY(mutex_);
  serving::AttachReactor* reactor_ = nullptr;
};

class LocalStream final : public client::AttachStream {
 public:
  explicit LocalStream(const serving::AttachContext& door)
      : wire_(door), descriptor_socket_(door.descriptor_socket) {}

  bool Write(const v1::AttachRequest& message) override { return wire_.Send(message); }
  bool Read(v1::AttachResponse& message) override {
    if (!wire_.Receive(message)) return false;
    // The daemon tells this only to workers on a Unix socket.
    if (message.has_welcome()) {
      message.mutable_welcome()->set_descriptor_socket(descriptor_socket_);
    }
    return true;
  }
  void FinishWriting() override { wire_.HangUp(); }
  absl::Status Finish() override { return FromGrpc(wire_.status()); }
  void Cancel() override { wire_.HangUp(); }

 private:
  Wire wire_;
  const std::string descriptor_socket_;
};

// A Match call. The answer may come at any time.
class LocalMatch final : public grpc::ServerCallbackUnary {
 public:
  LocalMatch(serving::WorkerService& service, const v1::MatchRequest& request,
             v1::MatchResponse& response)
      : reactor_(service.Match(&context_, &request, &response)) {
    BindReactor(reactor_);
  }
  ~LocalMatch() override { reactor_->OnDone(); }
  grpc::Status Wait() {
    MutexLock lock(mutex_);
    while (!status_.has_value()) changed_.Wait(mutex_);
    return *status_;
  }

 private:
  void Finish(grpc::Status status) override {
    MutexLock lock(mutex_);
    status_ = std::move(status);
    changed_.NotifyAll();
  }
  void SendInitialMetadata() override {}
  grpc::internal::ServerReactor* reactor() override { return reactor_; }
  void CallOnDone() override {}

  grpc::CallbackServerContext context_;
  Mutex mutex_;
  CondVar changed_;
  std::optional<grpc::Status> status_ TESSERA_GUARDED_BY(mutex_);
  grpc::ServerUnaryReactor* reactor_ = nullptr;
};

class LocalTransport final : public client::Transport {
 public:
  LocalTransport(serving::WorkerService& service, const serving::AttachContext& door)
      : service_(service), door_(door) {}

  absl::StatusOr<std::unique_ptr<client::AttachStream>> OpenAttach(Clock::Duration) override {
    return std::make_unique<LocalStream>(door_);
  }
  absl::StatusOr<std::unique_ptr<client::DescriptorSource>> OpenDescriptors(
      const v1::Welcome& welcome) override {
    absl::StatusOr<std::unique_ptr<client::DescriptorSocket>> opened =
        client::DescriptorSocket::Open(welcome.descriptor_socket(), welcome.session().session_id(),
                                       welcome.nonce());
    if (!opened.ok()) return opened.status();
    return std::unique_ptr<client::DescriptorSource>(*std::move(opened));
  }

#define TESSERA_CALL(Method)                                                            \
  absl::Status Call(const v1::Method##Request& request, v1::Method##Response& response, \
                    Clock::Duration) override {                                         \
    grpc::ServerContext context;                                                        \
    return FromGrpc(service_.Method(&context, &request, &response));                    \
  }
  TESSERA_CALL(RegisterModel)
  TESSERA_CALL(CreateSequence)
  TESSERA_CALL(Fork)
  TESSERA_CALL(Truncate)
  TESSERA_CALL(Handover)
  TESSERA_CALL(Free)
  TESSERA_CALL(Append)
  TESSERA_CALL(Compress)
  TESSERA_CALL(Observe)
  TESSERA_CALL(Select)
  TESSERA_CALL(Attend)
  TESSERA_CALL(Read)
  TESSERA_CALL(Publish)
  TESSERA_CALL(Offload)
  TESSERA_CALL(Restore)
  TESSERA_CALL(Describe)
  TESSERA_CALL(Stats)
#undef TESSERA_CALL
  absl::Status Call(const v1::MatchRequest& request, v1::MatchResponse& response,
                    Clock::Duration) override {
    return FromGrpc(LocalMatch(service_, request, response).Wait());
  }

 private:
  serving::WorkerService& service_;
  const serving::AttachContext door_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<client::Transport>> LocalConnector::NewTransport() {
  return std::make_unique<LocalTransport>(service_, door_);
}

}  // namespace tessera::fuzz
