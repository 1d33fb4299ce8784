#include "daemon/serving/rpc/worker_service.h"

#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/residency/tier_room.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/rpc/attend.h"
#include "daemon/serving/rpc/compress.h"
#include "daemon/serving/rpc/describe.h"
#include "daemon/serving/rpc/fork.h"
#include "daemon/serving/rpc/observe.h"
#include "daemon/serving/rpc/publish.h"
#include "daemon/serving/rpc/read.h"
#include "daemon/serving/rpc/select.h"

namespace tessera::serving {

absl::StatusOr<Admission::Place> WorkerService::Enter(Admission& admission,
                                                      const Caller& caller) const {
  return admission.Enter(caller.tenant->options().id,
                         [&] { return caller.cancelled() || services_.stopping.load(); });
}

// ---- models and sequences

absl::Status WorkerService::HandleRegisterModel(const Caller& caller,
                                                const v1::RegisterModelRequest& request,
                                                v1::RegisterModelResponse& response) {
  absl::StatusOr<cache::ModelSpec> spec = ToModelSpec(request.model());
  if (!spec.ok()) return spec.status();
  absl::StatusOr<std::shared_ptr<const cache::Model>> model =
      caller.tenant->RegisterModel(*std::move(spec), caller.session->id());
  if (!model.ok()) return model.status();
  response.set_model_id((*model)->id().value());
  return absl::OkStatus();
}

absl::Status WorkerService::HandleCreateSequence(const Caller& caller,
                                                 const v1::CreateSequenceRequest& request,
                                                 v1::CreateSequenceResponse& response) {
  if (services_.draining.load()) {
    return WithCause(absl::UnavailableError("the daemon is draining and accepts no new sequences"),
                     ErrorCause::kDraining);
  }
  absl::StatusOr<policies::Policy> policy =
      ToPolicy(request.policy(), request.has_policy_spec() ? &request.policy_spec() : nullptr);
  if (!policy.ok()) return policy.status();
  absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
      caller.tenant->CreateSequence(*caller.session, ModelId(request.model_id()));
  if (!sequence.ok()) return sequence.status();
  response.set_policy(policy->text);
  if (policy->selection.has_value()) {
    serving::Describe(*policy->selection, *response.mutable_selection());
  }
  if (auto needs = ToPolicyNeeds(*policy)) *response.mutable_needs() = *std::move(needs);
  if (absl::Status status = services_.compactor->SetPolicy(**sequence, *std::move(policy));
      !status.ok()) {
    caller.tenant->FreeSequence((*sequence)->id()).IgnoreError();
    return status;
  }
  response.set_sequence_id((*sequence)->id().value());
  response.set_directory_offset((*sequence)->directory_offset());
  return absl::OkStatus();
}

absl::Status WorkerService::HandleFork(const Caller& caller, const v1::ForkRequest& request,
                                       v1::ForkResponse& response) {
  absl::StatusOr<policies::Policy> own =
      ToPolicy(request.policy(), request.has_policy_spec() ? &request.policy_spec() : nullptr);
  if (!own.ok()) return own.status();
  std::optional<policies::Policy> asked;
  if (request.has_policy() || request.has_policy_spec()) asked = *std::move(own);
  const absl::StatusOr<std::shared_ptr<cache::Sequence>> child =
      ForkParent(services_, caller, request, std::move(asked));
  if (!child.ok()) return child.status();
  const policies::Policy policy = compaction::Compactor::PolicyOf(**child);
  response.set_policy(policy.text);
  response.set_position_shift((*child)->position_shift());
  if (auto needs = ToPolicyNeeds(policy)) *response.mutable_needs() = *std::move(needs);
  if (policy.selection.has_value()) {
    serving::Describe(*policy.selection, *response.mutable_selection());
  }
  response.set_sequence_id((*child)->id().value());
  response.set_directory_offset((*child)->directory_offset());
  response.set_tokens((*child)->Describe(/*lanes=*/false).tokens);
  return absl::OkStatus();
}

absl::Status WorkerService::HandleTruncate(const Caller& caller, const v1::TruncateRequest& request,
                                           v1::TruncateResponse&) {
  absl::StatusOr<cache::Residence> sequence =
      FindResident(*caller.tenant, SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  return services_.compactor->Truncate(**sequence, request.tokens());
}

absl::Status WorkerService::HandleHandover(const Caller& caller, const v1::HandoverRequest& request,
                                           v1::HandoverResponse&) {
  return caller.tenant->Handover(SequenceId(request.sequence_id()), *caller.session,
                                 SessionId(request.to_session_id()));
}

absl::Status WorkerService::HandleFree(const Caller& caller, const v1::FreeRequest& request,
                                       v1::FreeResponse& response) {
  std::uint64_t freed = 0;
  for (std::uint64_t id : request.sequence_ids()) {
    // An id is unique among sequences, prefixes and computations.
    freed += caller.tenant->FreeSequence(SequenceId(id)).ok() ||
             caller.tenant->prefixes().Free(PrefixId(id)) ||
             caller.tenant->prefixes().Withdraw(ComputationId(id), caller.session->id());
  }
  response.set_freed(freed);
  response.set_unknown(request.sequence_ids_size() - freed);
  return absl::OkStatus();
}

// ---- KV in, attention out

absl::Status WorkerService::HandleAppend(const Caller& caller, const v1::AppendRequest& request,
                                         v1::AppendResponse& response) {
  if (request.decoded() && request.end_of_prompt()) {
    return absl::InvalidArgumentError(
        "decoded and end_of_prompt are both set; set only one of them");
  }
  absl::StatusOr<cache::Residence> sequence =
      FindResident(*caller.tenant, SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  const cache::Model& model = (*sequence)->model();
  const absl::StatusOr<std::uint32_t> named =
      CountLayers(model, request.first_layer(), request.layers());
  if (!named.ok()) return named.status();
  const std::uint32_t layers = *named;
  if (absl::Status status = CheckSameShape(model, request.first_layer(), layers); !status.ok()) {
    return status;
  }
  const kernels::LayerGeometry geometry = model.geometry(request.first_layer());
  TensorRule rule = {.name = "key",
                     .type = model.spec().type,
                     .shape = {layers, 0, geometry.kv_heads, geometry.head_dim},
                     .layout = "[layers][tokens][kv_heads][head_dim]"};
  absl::StatusOr<TensorBytes> key = Resolve(request.key(), rule, *caller.session);
  if (!key.ok()) return key.status();
  rule.name = "value";
  rule.shape[1] = key->shape[1];
  absl::StatusOr<TensorBytes> value = Resolve(request.value(), rule, *caller.session);
  if (!value.ok()) return value.status();

  if (key->place != value->place) {
    return absl::InvalidArgumentError(
        "one of key and value is inline and the other in the staging arena; send both the same "
        "way");
  }
  const cache::TensorRows rows(
      key->place, key->data, value->data,
      {.first_layer = request.first_layer(),
       .tokens = key->shape[1],
       .kv_heads = geometry.kv_heads,
       .row_bytes = geometry.head_dim * kernels::ElementBytes(geometry.type)});
  const absl::StatusOr<std::uint64_t> tokens = services_.compactor->Append(
      sequence->sequence(),
      {.first_layer = request.first_layer(),
       .layers = layers,
       .end_of_prompt = request.end_of_prompt(),
       .decoded = request.decoded(),
       .first_token = request.first_token(),
       .until = request.first_token() + key->shape[1],
       .position_shift =
           request.has_position_shift() ? std::optional(request.position_shift()) : std::nullopt},
      rows);
  if (!tokens.ok()) return tokens.status();
  response.set_tokens(*tokens);
  return absl::OkStatus();
}

absl::Status WorkerService::HandleAttend(const Caller& caller, const v1::AttendRequest& request,
                                         v1::AttendResponse& response) {
  absl::StatusOr<Admission::Place> place = Enter(attention_, caller);
  if (!place.ok()) return place.status();
  return serving::Attend(services_, caller, request, response);
}

absl::Status WorkerService::HandleCompress(const Caller& caller, const v1::CompressRequest& request,
                                           v1::CompressResponse& response) {
  absl::StatusOr<Admission::Place> place = Enter(compression_, caller);
  if (!place.ok()) return place.status();
  return serving::Compress(services_, caller, request, response);
}

absl::Status WorkerService::HandleObserve(const Caller& caller, const v1::ObserveRequest& request,
                                          v1::ObserveResponse& response) {
  return serving::Observe(services_, caller, request, response);
}

absl::Status WorkerService::HandleSelect(const Caller& caller, const v1::SelectRequest& request,
                                         v1::SelectResponse& response) {
  absl::StatusOr<Admission::Place> place = Enter(attention_, caller);
  if (!place.ok()) return place.status();
  return serving::Select(services_, caller, request, response);
}

absl::Status WorkerService::HandleRead(const Caller& caller, const v1::ReadRequest& request,
                                       v1::ReadResponse& response) {
  absl::StatusOr<Admission::Place> place = Enter(description_, caller);
  if (!place.ok()) return place.status();
  return serving::Read(services_, caller, request, response);
}

absl::Status WorkerService::HandlePublish(const Caller& caller, const v1::PublishRequest& request,
                                          v1::PublishResponse& response) {
  // Publish compresses first if the policy does.
  absl::StatusOr<Admission::Place> place = Enter(compression_, caller);
  if (!place.ok()) return place.status();
  return serving::Publish(services_, caller, request, response);
}

// ---- tiers

absl::Status WorkerService::HandleOffload(const Caller& caller, const v1::OffloadRequest& request,
                                          v1::OffloadResponse& response) {
  absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
      caller.tenant->FindSequence(SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  absl::StatusOr<std::uint64_t> bytes =
      residency::OffloadSequence(*services_.node, *caller.tenant, **sequence);
  if (!bytes.ok()) return bytes.status();
  response.set_moved_bytes(*bytes);
  return absl::OkStatus();
}

absl::Status WorkerService::HandleRestore(const Caller& caller, const v1::RestoreRequest& request,
                                          v1::RestoreResponse& response) {
  absl::StatusOr<cache::Residence> sequence =
      FindResident(*caller.tenant, SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  response.set_tokens((*sequence)->Describe(/*lanes=*/false).tokens);
  return absl::OkStatus();
}

// ---- description and figures

absl::Status WorkerService::HandleDescribe(const Caller& caller, const v1::DescribeRequest& request,
                                           v1::DescribeResponse& response) {
  std::optional<Admission::Place> place;
  if (request.lanes() || request.entries()) {
    absl::StatusOr<Admission::Place> entered = Enter(description_, caller);
    if (!entered.ok()) return entered.status();
    place.emplace(*std::move(entered));
  }
  absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
      caller.tenant->FindSequence(SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  return DescribeSequence(services_, **sequence, request, response);
}

absl::Status WorkerService::HandleStats(const Caller& caller, const v1::StatsRequest&,
                                        v1::StatsResponse& response) {
  FillNodeStats(services_, response);
  FillTenantStats(*caller.tenant, *response.add_tenants());
  return absl::OkStatus();
}

}  // namespace tessera::serving
