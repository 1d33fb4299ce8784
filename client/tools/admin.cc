#include "client/tools/admin.h"

#include <unistd.h>

#include <chrono>
#include <string>

#include "client/rpc/channel.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

constexpr std::chrono::seconds kPatience{5};

// A daemon closes connections from users that its unix_peers do not list, without a message.
std::string UnixPeerHint(const std::string& address) {
  return address.starts_with("unix:") ? Concat(", and do its unix_peers admit user ", ::geteuid())
                                      : "";
}

template <typename Response, typename Call>
absl::StatusOr<Response> Run(const std::string& address, Call call,
                             std::chrono::seconds patience = kPatience) {
  grpc::ClientContext context;
  if (patience.count() > 0) {
    context.set_deadline(std::chrono::system_clock::now() + patience);
  }
  Response response;
  const grpc::Status status = call(&context, &response);
  if (status.ok()) return response;
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(Concat(
        "no daemon answers at ", address, " (", status.error_message(), "). Is tesserad running",
        UnixPeerHint(address), "? Use --address to name another daemon"));
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace

absl::StatusOr<Admin> Admin::At(const Door& door) {
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      client::OpenChannel(door.address, door.tls, grpc::ChannelArguments());
  if (!channel.ok()) return channel.status();
  return Admin(door.address, *channel);
}

absl::StatusOr<v1::StatsResponse> Admin::Stats() {
  return Run<v1::StatsResponse>(address_, [&](auto* context, auto* response) {
    return stub_->NodeStats(context, {}, response);
  });
}

absl::StatusOr<v1::ListPoliciesResponse> Admin::Policies() {
  return Run<v1::ListPoliciesResponse>(address_, [&](auto* context, auto* response) {
    return stub_->ListPolicies(context, {}, response);
  });
}

absl::StatusOr<v1::ListSessionsResponse> Admin::Sessions() {
  return Run<v1::ListSessionsResponse>(address_, [&](auto* context, auto* response) {
    return stub_->ListSessions(context, {}, response);
  });
}

absl::StatusOr<v1::ListSequencesResponse> Admin::Sequences(std::uint32_t limit) {
  v1::ListSequencesRequest request;
  request.set_limit(limit);
  return Run<v1::ListSequencesResponse>(address_, [&](auto* context, auto* response) {
    return stub_->ListSequences(context, request, response);
  });
}

absl::StatusOr<v1::ListPrefixesResponse> Admin::Prefixes(std::uint32_t limit) {
  v1::ListPrefixesRequest request;
  request.set_limit(limit);
  return Run<v1::ListPrefixesResponse>(address_, [&](auto* context, auto* response) {
    return stub_->ListPrefixes(context, request, response);
  });
}

absl::StatusOr<v1::DescribeResponse> Admin::Describe(std::uint64_t sequence) {
  v1::DescribeRequest request;
  request.set_sequence_id(sequence);
  request.set_lanes(true);
  return Run<v1::DescribeResponse>(address_, [&](auto* context, auto* response) {
    return stub_->Describe(context, request, response);
  });
}

absl::StatusOr<v1::CompressResponse> Admin::Compress(std::uint64_t sequence) {
  v1::CompressRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::CompressResponse>(
      address_,
      [&](auto* context, auto* response) { return stub_->Compress(context, request, response); },
      std::chrono::seconds(0));
}

absl::StatusOr<v1::SetPolicyResponse> Admin::SetPolicy(std::uint64_t sequence,
                                                       const std::string& policy) {
  v1::SetPolicyRequest request;
  request.set_sequence_id(sequence);
  request.set_policy(policy);
  return Run<v1::SetPolicyResponse>(address_, [&](auto* context, auto* response) {
    return stub_->SetPolicy(context, request, response);
  });
}

absl::StatusOr<v1::OffloadResponse> Admin::Offload(std::uint64_t sequence) {
  v1::OffloadRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::OffloadResponse>(
      address_,
      [&](auto* context, auto* response) { return stub_->Offload(context, request, response); },
      std::chrono::seconds(0));
}

absl::StatusOr<v1::RestoreResponse> Admin::Restore(std::uint64_t sequence) {
  v1::RestoreRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::RestoreResponse>(
      address_,
      [&](auto* context, auto* response) { return stub_->Restore(context, request, response); },
      std::chrono::seconds(0));
}

absl::Status Admin::Evict(std::uint64_t sequence) {
  v1::EvictRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::EvictResponse>(address_,
                                [&](auto* context, auto* response) {
                                  return stub_->Evict(context, request, response);
                                })
      .status();
}

absl::StatusOr<v1::DrainResponse> Admin::Drain(std::uint64_t limit_ms) {
  v1::DrainRequest request;
  request.set_limit_ms(limit_ms);
  return Run<v1::DrainResponse>(address_, [&](auto* context, auto* response) {
    return stub_->Drain(context, request, response);
  });
}

}  // namespace tessera::cli
