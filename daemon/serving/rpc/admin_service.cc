#include "daemon/serving/rpc/admin_service.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/registry.h"
#include "daemon/pool/epochs.h"
#include "daemon/residency/tier_room.h"
#include "daemon/serving/call/peer.h"
#include "daemon/serving/call/resident.h"
#include "daemon/serving/call/rpc_methods.h"
#include "daemon/serving/call/status.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/rpc/compress.h"
#include "daemon/serving/rpc/describe.h"

namespace tessera::serving {

template <typename Act>
absl::Status AdminService::Run(const char* method, const grpc::ServerContext& context, Act act) {
  const Clock::TimePoint begun = services_.clock->Now();
  const absl::Status status = act();
  const Clock::Duration duration = services_.clock->Now() - begun;
  services_.metrics->Rpc(kAdminServiceName, method).Finished(status.code(), duration);
  services_.call_log->Finished(method, context, status, duration);
  return status;
}

template <typename Act>
grpc::Status AdminService::Serve(const char* method, const grpc::ServerContext& context, Act act) {
  return ToGrpc(Run(method, context, act));
}

template <typename Act>
grpc::Status AdminService::Change(const char* method, const grpc::ServerContext& context,
                                  std::string_view object, Act act) {
  const absl::Status status = Run(method, context, act);
  services_.call_log->Audit(method, object, context, status);
  return ToGrpc(status);
}

namespace {
std::string SequenceText(std::uint64_t id) { return Concat("sequence ", id); }
}  // namespace

grpc::Status AdminService::ListSessions(grpc::ServerContext* context,
                                        const v1::ListSessionsRequest*,
                                        v1::ListSessionsResponse* response) {
  return Serve("ListSessions", *context, [&] {
    for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
      for (const std::shared_ptr<cache::SessionState>& session : tenant->Sessions()) {
        v1::SessionInfo& info = *response->add_sessions();
        info.set_session_id(session->id().value());
        info.set_tenant(tenant->name());
        info.set_worker_name(session->options().worker_name);
        info.set_group(session->options().group);
        info.set_rank(session->options().rank);
        info.set_age_seconds(
            std::chrono::duration<double>(services_.clock->Now() - session->options().attached)
                .count());
        info.set_sequences(static_cast<std::uint32_t>(session->Owned().size()));
        info.set_decoding_sequences(static_cast<std::uint32_t>(session->Decoding().size()));
        info.set_pinned_slots(pool::Epochs::Pinned(*session->pins()));
        info.set_mapped(session->mapped());
      }
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::ListSequences(grpc::ServerContext* context,
                                         const v1::ListSequencesRequest* request,
                                         v1::ListSequencesResponse* response) {
  return Serve("ListSequences", *context, [&]() -> absl::Status {
    constexpr std::size_t kDefaultLimit = 1000;
    const std::size_t limit = request->limit() == 0 ? kDefaultLimit : request->limit();
    if (!request->tenant().empty() && services_.node->TenantByName(request->tenant()) == nullptr) {
      return absl::NotFoundError(Concat("no tenant ", Quoted(request->tenant())));
    }
    std::vector<std::pair<const cache::Tenant*, std::shared_ptr<cache::Sequence>>> all;
    for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
      if (!request->tenant().empty() && tenant->name() != request->tenant()) continue;
      for (std::shared_ptr<cache::Sequence>& sequence : tenant->Sequences()) {
        all.emplace_back(tenant.get(), std::move(sequence));
      }
    }
    response->set_total(all.size());
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.second->id() > b.second->id(); });
    if (all.size() > limit) all.resize(limit);
    for (const auto& [tenant, sequence] : all) {
      const cache::Sequence::Description description = sequence->Describe(/*lanes=*/false);
      v1::SequenceInfo& info = *response->add_sequences();
      info.set_sequence_id(sequence->id().value());
      info.set_tenant(tenant->name());
      info.set_owner_session_id(description.owner.value());
      info.set_model(sequence->model().spec().name);
      info.set_policy(compaction::Compactor::PolicyOf(*sequence).text);
      info.set_state(StateOf(description));
      info.set_offloaded_bytes(description.stored_bytes);
      info.set_tokens(description.tokens);
      info.set_decoding(description.decoding);
      info.set_tile_bytes(description.tile_bytes);
      for (const cache::SegmentRun& run : sequence->Form())
        serving::Describe(run, *info.add_form());
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::ListPrefixes(grpc::ServerContext* context,
                                        const v1::ListPrefixesRequest* request,
                                        v1::ListPrefixesResponse* response) {
  return Serve("ListPrefixes", *context, [&]() -> absl::Status {
    constexpr std::size_t kDefaultLimit = 1000;
    const std::size_t limit = request->limit() == 0 ? kDefaultLimit : request->limit();
    if (!request->tenant().empty() && services_.node->TenantByName(request->tenant()) == nullptr) {
      return absl::NotFoundError(Concat("no tenant ", Quoted(request->tenant())));
    }
    for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
      if (!request->tenant().empty() && tenant->name() != request->tenant()) continue;
      std::vector<cache::PrefixStore::Description> prefixes = tenant->prefixes().List();
      response->set_total(response->total() + prefixes.size());
      if (prefixes.size() > limit) prefixes.resize(limit);
      for (const cache::PrefixStore::Description& prefix : prefixes) {
        serving::Describe(*services_.clock, prefix, *response->add_prefixes());
        response->mutable_prefixes()->rbegin()->set_tenant(tenant->name());
      }
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Evict(grpc::ServerContext* context, const v1::EvictRequest* request,
                                 v1::EvictResponse*) {
  const std::string object = Concat("sequence or prefix ", request->sequence_id());
  return Change("Evict", *context, object, [&]() -> absl::Status {
    const SequenceId id(request->sequence_id());
    cache::Tenant* tenant = services_.node->TenantOf(id.value());
    if (tenant == nullptr) return absl::NotFoundError(Concat("no ", id.ToString()));
    if (tenant->prefixes().Free(PrefixId(id.value()))) return absl::OkStatus();
    return tenant->FreeSequence(id);
  });
}

absl::StatusOr<std::shared_ptr<cache::Sequence>> AdminService::Find(std::uint64_t value) const {
  const SequenceId id(value);
  cache::Tenant* tenant = services_.node->TenantOf(value);
  if (tenant == nullptr) return absl::NotFoundError(Concat("no ", id.ToString()));
  return tenant->FindSequence(id);
}

grpc::Status AdminService::Describe(grpc::ServerContext* context,
                                    const v1::DescribeRequest* request,
                                    v1::DescribeResponse* response) {
  return Serve("Describe", *context, [&]() -> absl::Status {
    absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = Find(request->sequence_id());
    if (!sequence.ok()) return sequence.status();
    return DescribeSequence(services_, **sequence, *request, *response);
  });
}

grpc::Status AdminService::Compress(grpc::ServerContext* context,
                                    const v1::CompressRequest* request,
                                    v1::CompressResponse* response) {
  const std::string object = SequenceText(request->sequence_id());
  return Change("Compress", *context, object, [&]() -> absl::Status {
    if (request->has_packing() || request->has_rotations()) {
      return absl::InvalidArgumentError(
          "admin Compress applies the sequence's policy; leave packing and rotations unset");
    }
    const auto go_on = [&]() -> absl::Status {
      if (context->IsCancelled()) return absl::CancelledError("the caller has cancelled the call");
      if (services_.stopping.load())
        return WithCause(absl::UnavailableError("the daemon is stopping"), ErrorCause::kDraining);
      return absl::OkStatus();
    };
    return WithRows(*context, request->sequence_id(), [&](const cache::Residence& held) {
      const policies::Policy policy = compaction::Compactor::PolicyOf(*held.sequence());
      if (policies::MovesPositions(policy)) {
        return absl::Status(absl::FailedPreconditionError(
            Concat(Quoted(policy.text), " moves positions, and the worker of ",
                   held.sequence()->id().ToString(),
                   " must learn them: only the worker can compress it")));
      }
      return CompressByPolicy(services_,
                              {.sequence = held.sequence(), .amid_steps = true, .go_on = go_on},
                              *request, *response);
    });
  });
}

absl::Status AdminService::WithRows(
    grpc::ServerContext& context, std::uint64_t value,
    absl::FunctionRef<absl::Status(const cache::Residence&)> act) const {
  const absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = Find(value);
  if (!sequence.ok()) return sequence.status();
  cache::Tenant& tenant = *services_.node->TenantOf(value);
  return RetryWhenPoolFull(
      services_, tenant, [&] { return context.IsCancelled(); },
      [&]() -> absl::Status {
        const absl::StatusOr<cache::Residence> held = (*sequence)->Restore();
        return held.ok() ? act(*held) : held.status();
      });
}

grpc::Status AdminService::Offload(grpc::ServerContext* context, const v1::OffloadRequest* request,
                                   v1::OffloadResponse* response) {
  const std::string object = SequenceText(request->sequence_id());
  return Change("Offload", *context, object, [&]() -> absl::Status {
    absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = Find(request->sequence_id());
    if (!sequence.ok()) return sequence.status();
    cache::Tenant& tenant = *services_.node->TenantOf(request->sequence_id());
    absl::StatusOr<std::uint64_t> bytes =
        residency::OffloadSequence(*services_.node, tenant, **sequence);
    if (bytes.ok()) response->set_moved_bytes(*bytes);
    return bytes.status();
  });
}

grpc::Status AdminService::Restore(grpc::ServerContext* context, const v1::RestoreRequest* request,
                                   v1::RestoreResponse* response) {
  const std::string object = SequenceText(request->sequence_id());
  return Change("Restore", *context, object, [&] {
    return WithRows(*context, request->sequence_id(), [&](const cache::Residence& held) {
      response->set_tokens(held->Describe(/*lanes=*/false).tokens);
      return absl::OkStatus();
    });
  });
}

grpc::Status AdminService::SetPolicy(grpc::ServerContext* context,
                                     const v1::SetPolicyRequest* request,
                                     v1::SetPolicyResponse* response) {
  const std::string object =
      Concat(SequenceText(request->sequence_id()), " to ", request->policy());
  return Change("SetPolicy", *context, object, [&]() -> absl::Status {
    absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = Find(request->sequence_id());
    if (!sequence.ok()) return sequence.status();
    absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(request->policy());
    if (!policy.ok()) return policy.status();
    const policies::Needs shown = NeedsOf(compaction::Compactor::PolicyOf(**sequence));
    if (const policies::Needs asked = NeedsOf(*policy); asked != shown) {
      return absl::FailedPreconditionError(Concat(
          Quoted(policy->text), " needs ", policies::NeedsText(asked), ", but the worker of ",
          (*sequence)->id().ToString(), " observes ", policies::NeedsText(shown),
          " and is not notified. Let the worker fork the sequence under that policy"));
    }
    response->set_policy(policy->text);
    return services_.compactor->SetPolicy(**sequence, *std::move(policy));
  });
}

grpc::Status AdminService::ListPolicies(grpc::ServerContext* context,
                                        const v1::ListPoliciesRequest*,
                                        v1::ListPoliciesResponse* response) {
  return Serve("ListPolicies", *context, [&] {
    for (const policies::TermKind* kind : policies::TermKinds()) {
      v1::PolicyTerm& term = *response->add_terms();
      term.set_name(std::string(kind->name));
      term.set_meaning(Concat(kind->is, "."));
      term.set_sets(std::string(kind->sets));
      term.set_paper(std::string(kind->paper));
      term.set_needs(policies::NeedsTextOf(*kind));
      for (const policies::Option& option : kind->options) {
        v1::PolicyOption& shown = *term.add_options();
        shown.set_name(std::string(option.name));
        shown.set_type(policies::TypeText(option));
        shown.set_standard(std::string(option.standard));
        shown.set_range(policies::RangeText(option));
        shown.set_unit(std::string(option.unit));
        shown.set_help(Concat(option.help, "."));
      }
    }
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                                 v1::DrainResponse* response) {
  const std::string object = Concat("daemon, limit_ms ", request->limit_ms());
  return Change("Drain", *context, object, [&] {
    response->set_sessions(static_cast<std::uint32_t>(connections_.size()));
    actions_.drain(request->limit_ms());
    return absl::OkStatus();
  });
}

grpc::Status AdminService::Reload(grpc::ServerContext* context, const v1::ReloadRequest*,
                                  v1::ReloadResponse* response) {
  return Change("Reload", *context, "configuration", [&]() -> absl::Status {
    const absl::StatusOr<Reloaded> reloaded = actions_.reload();
    if (!reloaded.ok()) return reloaded.status();
    for (const std::string& field : reloaded->applied) response->add_applied(field);
    for (const std::string& field : reloaded->needs_restart) response->add_needs_restart(field);
    return absl::OkStatus();
  });
}

grpc::Status AdminService::NodeStats(grpc::ServerContext* context, const v1::NodeStatsRequest*,
                                     v1::StatsResponse* response) {
  return Serve("NodeStats", *context, [&] {
    FillNodeStats(services_, *response);
    for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
      FillTenantStats(*tenant, *response->add_tenants());
    }
    return absl::OkStatus();
  });
}

}  // namespace tessera::serving
