#include "daemon/serving/call/unary_call.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include <utility>

#include "daemon/serving/call/status.h"
#include "daemon/serving/call/wire.h"

namespace tessera::serving {

namespace {
// A parsed message may use this many times the largest message on the wire.
constexpr std::uint64_t kParsedPerWire = 4;
}  // namespace

UnaryCall::UnaryCall(const CallHost& host, std::string_view name, metrics::RpcMethod& method,
                     const Wire& wire)
    : host_(host), name_(name), method_(method), wire_(wire), begun_(host.services->clock->Now()) {}

void UnaryCall::Start() {
  if (absl::Status status = Admit(); !status.ok()) {
    End(status);
    return Release();
  }
  host_.threads->Run([this] { Handle(); });
}

absl::Status UnaryCall::Admit() {
  absl::StatusOr<Caller> caller =
      FindCaller(*services().node, PeekSessionKey(*wire_.request).value_or(v1::SessionKey()));
  if (!caller.ok()) return caller.status();
  const TenantId tenant = caller->tenant->options().id;
  absl::StatusOr<Shares::Held> place = host_.calls->Take(tenant);
  if (!place.ok()) return place.status();
  absl::StatusOr<Shares::Held> charge = host_.requests->Take(tenant, wire_.request->Length());
  if (!charge.ok()) return charge.status();
  caller->context = wire_.context;
  caller_ = *std::move(caller);
  place_ = *std::move(place);
  on_wire_ = *std::move(charge);
  return absl::OkStatus();
}

absl::Status UnaryCall::Parse(google::protobuf::Message& request) {
  const TenantId tenant = caller_->tenant->options().id;
  const absl::Status status = ParseBounded(
      *wire_.request, kParsedPerWire * services().max_message_bytes,
      [&](std::uint64_t bound) {
        absl::StatusOr<Shares::Held> charge = host_.requests->Take(tenant, bound);
        if (charge.ok()) parsed_ = *std::move(charge);
        return charge.status();
      },
      request);
  if (!status.ok()) return status;
  ClearBytes(*wire_.request);
  wire_.request->Clear();
  on_wire_.Reset();
  return absl::OkStatus();
}

absl::Status UnaryCall::Answer(const google::protobuf::Message& response, Effect effect) {
  const TenantId tenant = caller_->tenant->options().id;
  const std::uint64_t bytes = response.ByteSizeLong();
  if (effect == Effect::kChanges) {
    answer_ = host_.leaving->TakeAnyway(tenant, bytes);
  } else {
    absl::StatusOr<Shares::Held> room = host_.leaving->Take(tenant, bytes);
    if (!room.ok()) return room.status();
    answer_ = *std::move(room);
  }
  bool own = false;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(
          response, wire_.response, &own);
  if (!status.ok()) return absl::InternalError(status.error_message());
  return absl::OkStatus();
}

void UnaryCall::Handle() {
  const std::optional<absl::Status> status = Work(*caller_);
  parsed_.Reset();
  if (status.has_value()) {
    End(*status);
  } else {
    place_.Reset();  // a call that waits uses no thread
  }
  Release();
}

void UnaryCall::End(const absl::Status& status) {
  const Clock::TimePoint now = services().clock->Now();
  method_.Finished(status.code(), now - begun_);
  services().call_log->Finished(name_, *wire_.context, status, now - begun_);
  host_.unread->Add(*wire_.context, now);
  Finish(ToGrpc(status));
}

void UnaryCall::OnDone() {
  host_.unread->Remove(*wire_.context);
  Release();
}

void UnaryCall::Release() {
  if (holders_.fetch_sub(1) == 1) delete this;
}

}  // namespace tessera::serving
