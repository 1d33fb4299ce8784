// WorkerService implements the worker's service (proto/tessera/v1/tessera.proto): one short handler
// per RPC, which converts the request, acts, and converts the result back.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>
#include <thread>

#include "daemon/serving/attach/attach.h"
#include "daemon/serving/call/admission.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/calls.h"
#include "daemon/serving/call/resident.h"
#include "daemon/serving/call/rpc_methods.h"
#include "daemon/serving/call/services.h"
#include "daemon/serving/call/status.h"
#include "daemon/serving/rpc/match.h"
#include "tessera/v1/tessera.grpc.pb.h"

namespace tessera::serving {

// Attach and Match use gRPC's callback API, because a stream may be open for days and a match may
// wait for another worker. The other RPCs each use a gRPC thread.
using WorkerServiceBase = v1::Tessera::WithCallbackMethod_Match<
    v1::Tessera::WithCallbackMethod_Attach<v1::Tessera::Service>>;

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
        calls_(Calls::MaxCallsFor(services_.node->tenants().size()),
               services_.node->tenants().size()) {}

  grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse>* Attach(
      grpc::CallbackServerContext* context) override {
    return NewAttachReactor(door_, context);
  }
  grpc::ServerUnaryReactor* Match(grpc::CallbackServerContext*, const v1::MatchRequest* request,
                                  v1::MatchResponse* response) override {
    return NewMatchReactor(services_, match_, *request, *response);
  }

  // Adapts the tenants' shares of calls after a reload.
  void TenantsChanged() {
    attention_.SetWaiting(PerTenant(kWaitingAttention));
    compression_.SetWaiting(PerTenant(kWaitingCompression));
    calls_.SetTenants(services_.node->tenants().size());
  }

  template <typename Request, typename Response>
  using Handler = absl::Status (WorkerService::*)(const Caller&, const Request&, Response&);

#define TESSERA_RPC(Method)                                                             \
  grpc::Status Method(grpc::ServerContext* context, const v1::Method##Request* request, \
                      v1::Method##Response* response) override {                        \
    return Serve(#Method, method_##Method##_, *context, *request, *response,            \
                 &WorkerService::Handle##Method);                                       \
  }                                                                                     \
  absl::Status Handle##Method(const Caller& caller, const v1::Method##Request& request, \
                              v1::Method##Response& response);                          \
  metrics::RpcMethod& method_##Method##_ = services_.metrics->Rpc(kWorkerServiceName, #Method);

 private:
  static constexpr std::uint32_t kWaitingAttention = 64;  // of all tenants
  static constexpr std::uint32_t kWaitingCompression = 16;
  static std::uint32_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }
  // Each tenant's share of `calls` waiting calls.
  std::uint32_t PerTenant(std::uint32_t calls) const {
    const std::size_t tenants = services_.node->tenants().size();
    return std::max<std::uint32_t>(1, calls / static_cast<std::uint32_t>(tenants));
  }

  absl::StatusOr<Admission::Place> Enter(Admission& admission, const Caller& caller) const;

  const AttachContext door_;
  Services& services_;
  Admission attention_;
  Admission compression_;
  Calls calls_;
  metrics::RpcMethod& match_ = services_.metrics->Rpc(kWorkerServiceName, "Match");

 public:
  TESSERA_RPC(RegisterModel)
  TESSERA_RPC(CreateSequence)
  TESSERA_RPC(Fork)
  TESSERA_RPC(Truncate)
  TESSERA_RPC(Handover)
  TESSERA_RPC(Free)
  TESSERA_RPC(Append)
  TESSERA_RPC(Compress)
  TESSERA_RPC(Observe)
  TESSERA_RPC(Select)
  TESSERA_RPC(Attend)
  TESSERA_RPC(Publish)
  TESSERA_RPC(Offload)
  TESSERA_RPC(Restore)
  TESSERA_RPC(Describe)
  TESSERA_RPC(Stats)
#undef TESSERA_RPC

 private:
  // Common to all calls: finds the caller, takes a place, retries after reclaiming memory,
  // measures.
  template <typename Request, typename Response>
  grpc::Status Serve(std::string_view name, metrics::RpcMethod& method,
                     const grpc::ServerContext& context, const Request& request, Response& response,
                     Handler<Request, Response> handler);
};

template <typename Request, typename Response>
grpc::Status WorkerService::Serve(std::string_view name, metrics::RpcMethod& method,
                                  const grpc::ServerContext& context, const Request& request,
                                  Response& response, Handler<Request, Response> handler) {
  const Clock::TimePoint begun = services_.clock->Now();
  absl::StatusOr<Caller> caller = FindCaller(*services_.node, request.session());
  absl::Status status = caller.status();
  std::optional<Calls::Place> place;
  if (caller.ok()) {
    absl::StatusOr<Calls::Place> entered = calls_.Enter(caller->tenant->options().id);
    status = entered.status();
    if (status.ok()) place.emplace(*std::move(entered));
  }
  if (status.ok()) {
    caller->context = &context;
    status = RetryWhenPoolFull(
        services_, *caller->tenant, [&] { return caller->cancelled(); },
        [&] {
          response.Clear();
          return (this->*handler)(*caller, request, response);
        });
  }
  const Clock::Duration duration = services_.clock->Now() - begun;
  method.Finished(status.code(), duration);
  services_.call_log->Finished(name, context, status, duration);
  return ToGrpc(status);
}

}  // namespace tessera::serving
