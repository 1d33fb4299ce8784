#include "client/tools/admin.h"

#include <unistd.h>

#include <chrono>
#include <string>

#include "client/rpc/channel.h"
#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::cli {

template <typename Response, typename Call>
absl::StatusOr<Response> Admin::Run(Call call, Timeout timeout) const {
  grpc::ClientContext context;
  if (timeout == Timeout::kYes) {
    context.set_deadline(std::chrono::system_clock::now() + patience_);
  }
  Response response;
  const grpc::Status status = call(&context, &response);
  if (status.ok()) return response;
  const std::string& why = status.error_message();
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::DeadlineExceededError(Concat("the daemon at ", door_.address,
                                              " did not answer within ", patience_.count(), " s"));
  }
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(
        Concat("no daemon answers at ", door_.address, " (", why,
               "). Is tesserad running? Use --address to name another daemon"));
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), why);
}

namespace {

// The operator's socket of the daemon at a worker's address, or that socket itself, which may have
// any name.
absl::StatusOr<std::string> AdminAddressOf(const Door& door) {
  absl::StatusOr<std::string> address = AddressOf(door);
  if (!address.ok()) return address.status();
  if (!client::IsUnixAddress(*address)) {
    return absl::InvalidArgumentError(
        Concat("operators' calls go to a daemon's Unix socket, on its node; ", *address,
               " is a TCP address. Give --address=unix:PATH"));
  }
  const auto may = [](const std::string& unix_address, int how) {
    const std::string path =
        unix_address.substr(unix_address.find_first_not_of(':', unix_address.find(':')));
    return ::access(path.c_str(), how) == 0;
  };
  const std::string beside = Concat(*address, kAdminSuffix);
  if (!address->ends_with(kAdminSuffix) && (may(beside, F_OK) || !may(*address, F_OK))) {
    address = beside;
  }
  if (may(*address, F_OK) && !may(*address, W_OK)) {
    return absl::PermissionDeniedError(
        Concat("user ", ::geteuid(), " may not use ", *address,
               "; only the daemon's user and root may, for instance with sudo"));
  }
  return address;
}

}  // namespace

absl::StatusOr<Admin> Admin::At(Door door, std::chrono::seconds patience) {
  absl::StatusOr<std::string> address = AdminAddressOf(door);
  if (!address.ok()) return address.status();
  door.address = *std::move(address);
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      client::OpenChannel(door.address, door.tls, grpc::ChannelArguments());
  if (!channel.ok()) return channel.status();
  return Admin(std::move(door), patience, *channel);
}

absl::StatusOr<v1::StatsResponse> Admin::Stats() {
  return Run<v1::StatsResponse>(
      [&](auto* context, auto* response) { return stub_->NodeStats(context, {}, response); });
}

absl::StatusOr<v1::ListSessionsResponse> Admin::Sessions() {
  return Run<v1::ListSessionsResponse>(
      [&](auto* context, auto* response) { return stub_->ListSessions(context, {}, response); });
}

absl::StatusOr<v1::ListSequencesResponse> Admin::Sequences(std::uint32_t limit) {
  v1::ListSequencesRequest request;
  request.set_limit(limit);
  return Run<v1::ListSequencesResponse>([&](auto* context, auto* response) {
    return stub_->ListSequences(context, request, response);
  });
}

absl::StatusOr<v1::ListPrefixesResponse> Admin::Prefixes(std::uint32_t limit) {
  v1::ListPrefixesRequest request;
  request.set_limit(limit);
  return Run<v1::ListPrefixesResponse>([&](auto* context, auto* response) {
    return stub_->ListPrefixes(context, request, response);
  });
}

absl::StatusOr<v1::DescribeResponse> Admin::Describe(std::uint64_t sequence) {
  v1::DescribeRequest request;
  request.set_sequence_id(sequence);
  request.set_lanes(true);
  return Run<v1::DescribeResponse>(
      [&](auto* context, auto* response) { return stub_->Describe(context, request, response); });
}

absl::StatusOr<v1::CompressResponse> Admin::Compress(std::uint64_t sequence) {
  v1::CompressRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::CompressResponse>(
      [&](auto* context, auto* response) { return stub_->Compress(context, request, response); },
      Timeout::kNo);
}

absl::StatusOr<v1::SetPolicyResponse> Admin::SetPolicy(std::uint64_t sequence,
                                                       const std::string& policy) {
  v1::SetPolicyRequest request;
  request.set_sequence_id(sequence);
  request.set_policy(policy);
  return Run<v1::SetPolicyResponse>(
      [&](auto* context, auto* response) { return stub_->SetPolicy(context, request, response); });
}

absl::StatusOr<v1::OffloadResponse> Admin::Offload(std::uint64_t sequence) {
  v1::OffloadRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::OffloadResponse>(
      [&](auto* context, auto* response) { return stub_->Offload(context, request, response); },
      Timeout::kNo);
}

absl::StatusOr<v1::RestoreResponse> Admin::Restore(std::uint64_t sequence) {
  v1::RestoreRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::RestoreResponse>(
      [&](auto* context, auto* response) { return stub_->Restore(context, request, response); },
      Timeout::kNo);
}

absl::Status Admin::Evict(std::uint64_t sequence) {
  v1::EvictRequest request;
  request.set_sequence_id(sequence);
  return Run<v1::EvictResponse>([&](auto* context, auto* response) {
           return stub_->Evict(context, request, response);
         })
      .status();
}

absl::StatusOr<v1::ReloadResponse> Admin::Reload() {
  return Run<v1::ReloadResponse>(
      [&](auto* context, auto* response) { return stub_->Reload(context, {}, response); });
}

absl::StatusOr<v1::DrainResponse> Admin::Drain(std::uint64_t limit_ms) {
  v1::DrainRequest request;
  request.set_limit_ms(limit_ms);
  return Run<v1::DrainResponse>(
      [&](auto* context, auto* response) { return stub_->Drain(context, request, response); });
}

}  // namespace tessera::cli
