// UnaryCall is one call of a worker: who calls is known before the message is parsed, and what the
// message needs is charged to the tenant before it is allocated.
//
//   gRPC's thread   session key -> caller, place, charge for the bytes on the wire
//   call thread     bound of the parsed size -> charge, parse, handle, serialise
//   OnDone          the answer is sent: gives back place and charges
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/metrics/metrics.h"
#include "daemon/serving/call/call_deadlines.h"
#include "daemon/serving/call/call_threads.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/call/shares.h"

namespace tessera::serving {

// What all calls share. Must outlive them.
struct CallHost {
  Services* services;
  Shares* calls;     // running calls
  Shares* requests;  // bytes of requests that are there
  Shares* leaving;   // bytes of answers that are not sent yet
  CallDeadlines* unread;
  CallThreads* threads;
};

// Deletes itself when the call is done and no thread works on it.
class UnaryCall : public grpc::ServerUnaryReactor {
 public:
  // The arguments of a raw method of gRPC. They live until OnDone.
  struct Wire {
    grpc::CallbackServerContext* context;
    grpc::ByteBuffer* request;
    grpc::ByteBuffer* response;
  };
  // A call that has changed something is answered whatever the tenant has not taken yet.
  enum class Effect : std::uint8_t { kReads, kChanges };
  UnaryCall(const CallHost& host, std::string_view name, metrics::RpcMethod& method,
            const Wire& wire);

  // Call it once, as the last act of the method.
  void Start();

  void OnCancel() override {}  // handlers ask Caller::cancelled()
  void OnDone() override;

 protected:
  // On a call thread: parses the request with Parse, handles it, and passes the answer to Answer.
  // Returns the outcome, or nullopt if End will be called, perhaps on another thread.
  virtual std::optional<absl::Status> Work(Caller& caller) = 0;
  // Call it once. What the call holds is given back when the answer is sent.
  void End(const absl::Status& status);

  // Errors: INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
  absl::Status Parse(google::protobuf::Message& request);
  absl::Status Answer(const google::protobuf::Message& response, Effect effect);
  Services& services() const { return *host_.services; }

 private:
  absl::Status Admit();
  void Handle();
  void Release();

  const CallHost host_;
  const std::string_view name_;
  metrics::RpcMethod& method_;
  const Wire wire_;
  const Clock::TimePoint begun_;
  std::atomic<int> holders_{2};  // gRPC until OnDone, and the thread that starts the call
  std::optional<Caller> caller_;
  Shares::Held place_;
  Shares::Held on_wire_;
  Shares::Held parsed_;
  Shares::Held answer_;
};

}  // namespace tessera::serving
