// A worker made of bare gRPC stubs and sockets, without the client library. It can send messages
// that a correct client never sends.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/descriptors.h"
#include "tessera/v1/tessera.grpc.pb.h"

namespace tessera::fakes {

class RawWorker {
 public:
  // A Hello that a daemon of this build accepts.
  static v1::Hello GoodHello();

  explicit RawWorker(std::shared_ptr<grpc::Channel> channel)
      : stub_(v1::Tessera::NewStub(std::move(channel))) {}
  ~RawWorker() { Leave(); }

  // Sends Hello. Returns OK and sets `welcome()` once attached, else the stream's final status.
  grpc::Status Attach(const v1::Hello& hello = GoodHello());
  const v1::Welcome& welcome() const { return welcome_; }
  const v1::SessionKey& key() const { return welcome_.session(); }
  // Sends Hello once more, which is not allowed, and returns the stream's final status.
  grpc::Status GreetAgain();
  // Closes the stream and returns its final status.
  grpc::Status Leave();
  // Sends Leave and breaks the stream at once, as a process that exits does. Waits for its end.
  void LeaveAndBreak();
  // Breaks the stream without a word.
  void Break();
  // Waits until the daemon ends the stream, and returns the final status.
  grpc::Status AwaitEnd();

  v1::TailsOpened OpenTails(const std::vector<std::uint64_t>& sequences);
  v1::TailsClosed CloseTails(const std::vector<std::uint64_t>& sequences);

  // Opens the descriptor socket with the right nonce.
  absl::Status OpenDescriptors();
  struct Descriptor {
    shm::DescriptorAnswer answer;
    Fd fd;
  };
  absl::StatusOr<Descriptor> Fetch(shm::DescriptorKind kind, std::uint32_t index);
  Fd& descriptor_socket() { return socket_; }
  // Wakes the daemon to absorb tails. The descriptor socket must be open.
  void SignalWake() const { SignalEvent(wake_event_.get()); }

  // RPCs. The session key is filled in if the request has none.
  grpc::Status RegisterModel(v1::RegisterModelRequest request, v1::RegisterModelResponse* response);
  grpc::Status CreateSequence(v1::CreateSequenceRequest request,
                              v1::CreateSequenceResponse* response);
  grpc::Status Append(v1::AppendRequest request, v1::AppendResponse* response);
  grpc::Status Attend(v1::AttendRequest request, v1::AttendResponse* response);
  grpc::Status Read(v1::ReadRequest request, v1::ReadResponse* response);
  grpc::Status Fork(v1::ForkRequest request, v1::ForkResponse* response);
  grpc::Status Truncate(v1::TruncateRequest request, v1::TruncateResponse* response);
  grpc::Status Handover(v1::HandoverRequest request, v1::HandoverResponse* response);
  grpc::Status Describe(v1::DescribeRequest request, v1::DescribeResponse* response);
  grpc::Status Free(v1::FreeRequest request, v1::FreeResponse* response);
  v1::Tessera::Stub& stub() { return *stub_; }

 private:
  v1::AttachResponse ReadReply();

  std::unique_ptr<v1::Tessera::Stub> stub_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachResponse>> stream_;
  v1::Welcome welcome_;
  Fd socket_;
  Fd wake_event_;
  std::uint64_t next_request_ = 1;
};

// A small model: bf16, `layers` layers of 4 query heads over 2 kv heads, head_dim 64.
v1::ModelGeometry SmallModel(int layers = 2);
// [layers][tokens][2][64] of bf16 values that depend on `seed`.
v1::Tensor SmallRows(int layers, int tokens, std::uint32_t seed);

}  // namespace tessera::fakes
