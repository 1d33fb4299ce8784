// WorkerService implements the worker's service (proto/tessera/v1/tessera.proto): one short handler
// per RPC, which converts the request, acts, and converts the result back.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>

#include "daemon/base/check.h"
#include "daemon/guard/guarded_sockets.h"
#include "daemon/serving/attach/attach.h"
#include "daemon/serving/call/admission.h"
#include "daemon/serving/call/call_deadlines.h"
#include "daemon/serving/call/call_threads.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/calls.h"
#include "daemon/serving/call/resident.h"
#include "daemon/serving/call/rpc_methods.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/call/shares.h"
#include "daemon/serving/call/status.h"
#include "daemon/serving/call/unary_call.h"
#include "daemon/serving/call/wire.h"
#include "daemon/serving/rpc/match.h"
#include "tessera/v1/tessera.grpc.pb.h"

namespace tessera::serving {

// All methods use gRPC's callback API, so no call holds a thread of gRPC: a stream may be open for
// days, a match may wait for another worker, and a peer may not take its answer. They are raw,
// because a message is parsed only when its caller is known.
template <template <typename> typename... Layers>
struct Stack;
template <template <typename> typename First, template <typename> typename... Rest>
struct Stack<First, Rest...> {
  using Type = First<typename Stack<Rest...>::Type>;
};
template <>
struct Stack<> {
  using Type = v1::Tessera::Service;
};
using WorkerServiceBase =
    Stack<v1::Tessera::WithRawCallbackMethod_Attach, v1::Tessera::WithRawCallbackMethod_Match,
          v1::Tessera::WithRawCallbackMethod_RegisterModel,
          v1::Tessera::WithRawCallbackMethod_CreateSequence,
          v1::Tessera::WithRawCallbackMethod_Fork, v1::Tessera::WithRawCallbackMethod_Truncate,
          v1::Tessera::WithRawCallbackMethod_Handover, v1::Tessera::WithRawCallbackMethod_Free,
          v1::Tessera::WithRawCallbackMethod_Append, v1::Tessera::WithRawCallbackMethod_Compress,
          v1::Tessera::WithRawCallbackMethod_Observe, v1::Tessera::WithRawCallbackMethod_Select,
          v1::Tessera::WithRawCallbackMethod_Attend, v1::Tessera::WithRawCallbackMethod_Read,
          v1::Tessera::WithRawCallbackMethod_Publish, v1::Tessera::WithRawCallbackMethod_Offload,
          v1::Tessera::WithRawCallbackMethod_Restore, v1::Tessera::WithRawCallbackMethod_Describe,
          v1::Tessera::WithRawCallbackMethod_Stats>::Type;

// Owned by the Server. Thread-safe.
class WorkerService final : public WorkerServiceBase {
 public:
  explicit WorkerService(const AttachContext& door)
      : door_(door),
        services_(*door.services),
        attention_({.what = "attention",
                    .running = std::min(96u, 2 * Cores()),
                    .waiting = PerTenant(kWaitingAttention)}),
        // One more than the compactor's threads, so that it does not idle between two calls. Calls
        // with a packing use a core each.
        compression_(
            {.what = "compression",
             .running = std::min(64u, std::max(services_.compactor_threads + 1, Cores() / 2)),
             .waiting = PerTenant(kWaitingCompression)}),
        // Their answers may be large.
        description_(
            {.what = "description", .running = 4, .waiting = PerTenant(kWaitingAttention)}),
        calls_({.what = "calls running", .most = MaxCallsFor(Tenants()), .tenants = Tenants()}),
        arriving_({.what = "bytes of unfinished requests",
                   .most = services_.message_bytes / 8 * 3,
                   .tenants = Tenants(),
                   .least_part = 2 * services_.max_message_bytes}),
        // A request has its bytes and their parsed form at a time.
        requests_({.what = "bytes of requests",
                   .most = services_.message_bytes / 8 * 3,
                   .tenants = Tenants(),
                   .least_part = 2 * services_.max_message_bytes}),
        leaving_({.what = "bytes of answers that it has not taken",
                  .most = services_.message_bytes / 4,
                  .tenants = Tenants(),
                  .least_part = services_.max_message_bytes}),
        // One of gRPC's threads is always left to receive and send.
        threads_({.most = CallThreadsFor(Tenants()),
                  .most_of_grpc = CallThreads::ThreadsOfGrpc() - 1}) {}

  AttachReactor* Attach(grpc::CallbackServerContext* context) override {
    // A gRPC that reads in another way would pass every connection unguarded.
    TESSERA_CHECK(GuardedSockets::OfProcess().bytes_seen() > 0, "this gRPC's reads are guarded");
    return NewAttachReactor(door_, context);
  }
  grpc::ServerUnaryReactor* Match(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override {
    return StartMatch(Host(), match_, WireOf(context, request, response));
  }
  // For callers in this process.
  grpc::ServerUnaryReactor* Match(grpc::CallbackServerContext*, const v1::MatchRequest* request,
                                  v1::MatchResponse* response) {
    return NewMatchReactor(services_, match_, *request, *response);
  }

  // Calls whose answers are on their way.
  CallDeadlines& unread() { return unread_; }
  // Bytes of requests that are arriving, and of those that are there.
  Shares& arriving() { return arriving_; }
  Shares& requests() { return requests_; }

  // Adapts the tenants' shares of calls after a reload.
  void TenantsChanged() {
    attention_.SetWaiting(PerTenant(kWaitingAttention));
    compression_.SetWaiting(PerTenant(kWaitingCompression));
    description_.SetWaiting(PerTenant(kWaitingAttention));
    calls_.SetTenants(Tenants());
    arriving_.SetTenants(Tenants());
    requests_.SetTenants(Tenants());
    leaving_.SetTenants(Tenants());
  }

  template <typename Request, typename Response>
  using Handler = absl::Status (WorkerService::*)(const Caller&, const Request&, Response&);

// The raw method, which gRPC calls; the same call for callers in this process; and its handler.
#define TESSERA_RPC(Method, effect)                                                             \
  grpc::ServerUnaryReactor* Method(grpc::CallbackServerContext* context,                        \
                                   const grpc::ByteBuffer* request, grpc::ByteBuffer* response) \
      override {                                                                                \
    return Begin<v1::Method##Request, v1::Method##Response>(                                    \
        #Method, method_##Method##_, WireOf(context, request, response),                        \
        &WorkerService::Handle##Method, UnaryCall::Effect::effect);                             \
  }                                                                                             \
  grpc::Status Method(grpc::ServerContext* context, const v1::Method##Request* request,         \
                      v1::Method##Response* response) override {                                \
    return Serve(#Method, method_##Method##_, *context, *request, *response,                    \
                 &WorkerService::Handle##Method);                                               \
  }                                                                                             \
  absl::Status Handle##Method(const Caller& caller, const v1::Method##Request& request,         \
                              v1::Method##Response& response);                                  \
  metrics::RpcMethod& method_##Method##_ = services_.metrics->Rpc(kWorkerServiceName, #Method);

 private:
  static constexpr std::chrono::seconds kUnreadPatience{30};
  static constexpr std::uint32_t kWaitingAttention = 64;  // of all tenants
  static constexpr std::uint32_t kWaitingCompression = 16;
  static std::uint32_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }
  std::size_t Tenants() const { return services_.node->tenants().size(); }
  CallHost Host() { return {&services_, &calls_, &requests_, &leaving_, &unread_, &threads_}; }
  // gRPC passes the request as const, but nothing else reads it.
  static UnaryCall::Wire WireOf(grpc::CallbackServerContext* context,
                                const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
    return {context, const_cast<grpc::ByteBuffer*>(request), response};
  }
  // Each tenant's share of `calls` waiting calls.
  std::uint32_t PerTenant(std::uint32_t calls) const {
    return std::max<std::uint32_t>(1, calls / static_cast<std::uint32_t>(Tenants()));
  }

  absl::StatusOr<Admission::Place> Enter(Admission& admission, const Caller& caller) const;

  const AttachContext door_;
  Services& services_;
  Admission attention_;
  Admission compression_;
  Admission description_;
  Shares calls_;
  Shares arriving_;
  Shares requests_;
  Shares leaving_;
  CallDeadlines unread_{kUnreadPatience};
  CallThreads threads_;
  metrics::RpcMethod& match_ = services_.metrics->Rpc(kWorkerServiceName, "Match");

 public:
  TESSERA_RPC(RegisterModel, kChanges)
  TESSERA_RPC(CreateSequence, kChanges)
  TESSERA_RPC(Fork, kChanges)
  TESSERA_RPC(Truncate, kChanges)
  TESSERA_RPC(Handover, kChanges)
  TESSERA_RPC(Free, kChanges)
  TESSERA_RPC(Append, kChanges)
  TESSERA_RPC(Compress, kChanges)
  TESSERA_RPC(Observe, kChanges)
  TESSERA_RPC(Select, kReads)
  TESSERA_RPC(Attend, kReads)
  TESSERA_RPC(Read, kReads)
  TESSERA_RPC(Publish, kChanges)
  TESSERA_RPC(Offload, kChanges)
  TESSERA_RPC(Restore, kChanges)
  TESSERA_RPC(Describe, kReads)
  TESSERA_RPC(Stats, kReads)
#undef TESSERA_RPC

 private:
  template <typename Request, typename Response>
  class Call;
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Begin(std::string_view name, metrics::RpcMethod& method,
                                  const UnaryCall::Wire& wire, Handler<Request, Response> handler,
                                  UnaryCall::Effect effect) {
    auto* const call = new Call<Request, Response>(*this, name, method, wire, handler, effect);
    call->Start();
    return call;
  }

  // Retries after reclaiming memory.
  template <typename Request, typename Response>
  absl::Status Handle(const Caller& caller, const Request& request, Response& response,
                      Handler<Request, Response> handler) {
    return RetryWhenPoolFull(
        services_, *caller.tenant, [&] { return caller.cancelled(); },
        [&] {
          response.Clear();
          return (this->*handler)(caller, request, response);
        });
  }

  template <typename Request, typename Response>
  grpc::Status Serve(std::string_view name, metrics::RpcMethod& method,
                     const grpc::ServerContext& context, const Request& request, Response& response,
                     Handler<Request, Response> handler);
};

template <typename Request, typename Response>
class WorkerService::Call final : public UnaryCall {
 public:
  Call(WorkerService& service, std::string_view name, metrics::RpcMethod& method, const Wire& wire,
       Handler<Request, Response> handler, Effect effect)
      : UnaryCall(service.Host(), name, method, wire),
        service_(service),
        handler_(handler),
        effect_(effect) {}

 private:
  std::optional<absl::Status> Work(Caller& caller) override {
    Request request;
    if (absl::Status status = Parse(request); !status.ok()) return status;
    Response response;
    absl::Status status = service_.Handle(caller, request, response, handler_);
    ClearBytes(request);
    return status.ok() ? Answer(response, effect_) : status;
  }

  WorkerService& service_;
  const Handler<Request, Response> handler_;
  const Effect effect_;
};

template <typename Request, typename Response>
grpc::Status WorkerService::Serve(std::string_view name, metrics::RpcMethod& method,
                                  const grpc::ServerContext& context, const Request& request,
                                  Response& response, Handler<Request, Response> handler) {
  const Clock::TimePoint begun = services_.clock->Now();
  absl::StatusOr<Caller> caller = FindCaller(*services_.node, request.session());
  absl::Status status = caller.status();
  Shares::Held place;
  if (caller.ok()) {
    absl::StatusOr<Shares::Held> entered = calls_.Take(caller->tenant->options().id);
    status = entered.status();
    if (status.ok()) place = *std::move(entered);
  }
  if (status.ok()) {
    caller->context = &context;
    status = Handle(*caller, request, response, handler);
  }
  const Clock::Duration duration = services_.clock->Now() - begun;
  method.Finished(status.code(), duration);
  services_.call_log->Finished(name, context, status, duration);
  return ToGrpc(status);
}

}  // namespace tessera::serving
