#include "client/rpc/grpc_transport.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <limits>
#include <utility>

#include "client/rpc/channel.h"
#include "client/rpc/daemon_directory.h"
#include "client/rpc/status.h"
#include "daemon/base/strings.h"
#include "tessera/v1/tessera.grpc.pb.h"

namespace tessera::client {

namespace {

std::chrono::system_clock::time_point Deadline(Clock::Duration timeout) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(timeout);
}

class GrpcAttachStream final : public AttachStream {
 public:
  GrpcAttachStream(v1::Tessera::Stub& stub, std::string address, bool tls)
      : address_(std::move(address)), tls_(tls), stream_(stub.Attach(&context_)) {}

  bool Write(const v1::AttachRequest& message) override {
    grpc::WriteOptions options;
    // The process may exit right after it: only then the message has reached the kernel.
    if (message.has_leave()) options.set_write_through();
    return stream_->Write(message, options);
  }
  bool Read(v1::AttachResponse& message) override { return stream_->Read(&message); }
  void FinishWriting() override { stream_->WritesDone(); }
  absl::Status Finish() override {
    const absl::Status status = FromGrpc(stream_->Finish());
    if (!absl::IsUnavailable(status)) return status;
    const std::string_view why = AsStringView(status.message());
    const std::string hint = TlsHint(address_, tls_, why);
    return hint.empty() ? status : absl::UnavailableError(Concat(why, "; ", hint));
  }
  void Cancel() override { context_.TryCancel(); }

 private:
  const std::string address_;
  const bool tls_;
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream_;
};

class GrpcTransport final : public Transport {
 public:
  static absl::StatusOr<std::unique_ptr<Transport>> Open(const std::string& address,
                                                         const std::optional<TlsOptions>& tls) {
    grpc::ChannelArguments arguments;
    // No other channel shares the connection, so a new attachment starts with a fresh one.
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    // The daemon's limit applies (Welcome.max_message_bytes).
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = OpenChannel(address, tls, arguments);
    if (!channel.ok()) return channel.status();
    return std::unique_ptr<Transport>(
        new GrpcTransport(address, tls.has_value(), *std::move(channel)));
  }

  absl::StatusOr<std::unique_ptr<AttachStream>> OpenAttach(Clock::Duration timeout) override {
    const auto deadline = Deadline(timeout);
    for (;;) {
      const grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
      // If the connection is refused, the stream reports the reason.
      if (state != GRPC_CHANNEL_IDLE && state != GRPC_CHANNEL_CONNECTING) break;
      if (!channel_->WaitForStateChange(state, deadline)) {
        return absl::UnavailableError(Concat("no daemon answers at ", address_, " within ",
                                             std::chrono::duration<double>(timeout).count(), " s"));
      }
    }
    return std::make_unique<GrpcAttachStream>(*stub_, address_, tls_);
  }

  absl::StatusOr<std::unique_ptr<DescriptorSource>> OpenDescriptors(
      const v1::Welcome& welcome) override {
    const std::uint64_t session = welcome.session().session_id();
    const std::string& path = welcome.descriptor_socket();
    absl::StatusOr<std::unique_ptr<DescriptorSocket>> opened =
        DescriptorSocket::Open(path, session, welcome.nonce());
    if (absl::IsUnavailable(opened.status())) {
      // A container may mount it elsewhere: try the folder of the socket that this client uses.
      const std::string beside = Beside(path);
      if (beside != path) opened = DescriptorSocket::Open(beside, session, welcome.nonce());
    }
    if (!opened.ok()) {
      return absl::Status(opened.status().code(),
                          Concat("mapping memory over the descriptor socket ", path, ": ",
                                 AsStringView(opened.status().message()),
                                 "; set map_memory=false to attach without mapping"));
    }
    return std::unique_ptr<DescriptorSource>(*std::move(opened));
  }

  absl::Status Call(const v1::RegisterModelRequest& request, v1::RegisterModelResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::RegisterModel, request, response, timeout);
  }
  absl::Status Call(const v1::CreateSequenceRequest& request, v1::CreateSequenceResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::CreateSequence, request, response, timeout);
  }
  absl::Status Call(const v1::ForkRequest& request, v1::ForkResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Fork, request, response, timeout);
  }
  absl::Status Call(const v1::TruncateRequest& request, v1::TruncateResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Truncate, request, response, timeout);
  }
  absl::Status Call(const v1::HandoverRequest& request, v1::HandoverResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Handover, request, response, timeout);
  }
  absl::Status Call(const v1::FreeRequest& request, v1::FreeResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Free, request, response, timeout);
  }
  absl::Status Call(const v1::AppendRequest& request, v1::AppendResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Append, request, response, timeout);
  }
  absl::Status Call(const v1::CompressRequest& request, v1::CompressResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Compress, request, response, timeout);
  }
  absl::Status Call(const v1::ObserveRequest& request, v1::ObserveResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Observe, request, response, timeout);
  }
  absl::Status Call(const v1::SelectRequest& request, v1::SelectResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Select, request, response, timeout);
  }
  absl::Status Call(const v1::AttendRequest& request, v1::AttendResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Attend, request, response, timeout);
  }
  absl::Status Call(const v1::ReadRequest& request, v1::ReadResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Read, request, response, timeout);
  }
  absl::Status Call(const v1::PublishRequest& request, v1::PublishResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Publish, request, response, timeout);
  }
  absl::Status Call(const v1::MatchRequest& request, v1::MatchResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Match, request, response, timeout);
  }
  absl::Status Call(const v1::OffloadRequest& request, v1::OffloadResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Offload, request, response, timeout);
  }
  absl::Status Call(const v1::RestoreRequest& request, v1::RestoreResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Restore, request, response, timeout);
  }
  absl::Status Call(const v1::DescribeRequest& request, v1::DescribeResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Describe, request, response, timeout);
  }
  absl::Status Call(const v1::StatsRequest& request, v1::StatsResponse& response,
                    Clock::Duration timeout) override {
    return Run(&v1::Tessera::Stub::Stats, request, response, timeout);
  }

 private:
  GrpcTransport(const std::string& address, bool tls, std::shared_ptr<grpc::Channel> channel)
      : address_(address),
        tls_(tls),
        channel_(std::move(channel)),
        stub_(v1::Tessera::NewStub(channel_)) {}

  template <typename Request, typename Response>
  using Method = grpc::Status (v1::Tessera::Stub::*)(grpc::ClientContext*, const Request&,
                                                     Response*);

  template <typename Request, typename Response>
  absl::Status Run(Method<Request, Response> method, const Request& request, Response& response,
                   Clock::Duration timeout) {
    grpc::ClientContext context;
    context.set_deadline(Deadline(timeout));
    return FromGrpc((stub_.get()->*method)(&context, request, &response));
  }

  std::string Beside(const std::string& path) const {
    if (!IsUnixAddress(address_)) return path;
    const std::string socket = address_.substr(address_.find(':') + 1);
    return socket.substr(0, socket.rfind('/') + 1) + path.substr(path.rfind('/') + 1);
  }

  const std::string address_;
  const bool tls_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Tessera::Stub> stub_;
};

class GrpcConnector final : public Connector {
 public:
  explicit GrpcConnector(GrpcTarget target)
      : target_(std::move(target)), in_directory_(IsDirectoryAddress(target_.address)) {}
  absl::StatusOr<std::unique_ptr<Transport>> NewTransport() override {
    if (!in_directory_) return GrpcTransport::Open(target_.address, target_.tls);
    // Picked anew for each attachment, because the daemon's successor may use another name.
    const absl::StatusOr<DaemonSocket> socket = PickDaemon(target_.address, target_.device);
    if (!socket.ok()) return socket.status();
    return GrpcTransport::Open(socket->address(), target_.tls);
  }
  absl::Status Check(const v1::Welcome& welcome) const override {
    return CheckDevice(welcome, target_.device);
  }
  bool local() const override { return IsUnixAddress(target_.address); }
  const std::string& address() const override { return target_.address; }

 private:
  const GrpcTarget target_;
  const bool in_directory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Connector>> NewGrpcConnector(GrpcTarget target) {
  if (absl::Status status = CheckAddress(target.address); !status.ok()) return status;
  return std::unique_ptr<Connector>(std::make_unique<GrpcConnector>(std::move(target)));
}

}  // namespace tessera::client
