// Client of the TesseraAdmin service, with errors that tell an operator what to do next.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/tools/connection.h"
#include "tessera/v1/admin.grpc.pb.h"

namespace tessera::cli {

// One connection to one daemon. Calls block; every call but Compress, Offload and Restore times out
// after 5 seconds.
class Admin {
 public:
  static absl::StatusOr<Admin> At(const Door& door);

  absl::StatusOr<v1::StatsResponse> Stats();
  absl::StatusOr<v1::ListSessionsResponse> Sessions();
  absl::StatusOr<v1::ListSequencesResponse> Sequences(std::uint32_t limit);
  absl::StatusOr<v1::ListPrefixesResponse> Prefixes(std::uint32_t limit);
  absl::StatusOr<v1::ListPoliciesResponse> Policies();
  absl::StatusOr<v1::DescribeResponse> Describe(std::uint64_t sequence);
  // No timeout.
  absl::StatusOr<v1::CompressResponse> Compress(std::uint64_t sequence);
  absl::StatusOr<v1::SetPolicyResponse> SetPolicy(std::uint64_t sequence,
                                                  const std::string& policy);
  absl::StatusOr<v1::OffloadResponse> Offload(std::uint64_t sequence);
  absl::StatusOr<v1::RestoreResponse> Restore(std::uint64_t sequence);
  absl::Status Evict(std::uint64_t sequence);
  absl::StatusOr<v1::DrainResponse> Drain(std::uint64_t limit_ms);

 private:
  Admin(std::string address, const std::shared_ptr<grpc::Channel>& channel)
      : address_(std::move(address)), stub_(v1::TesseraAdmin::NewStub(channel)) {}

  std::string address_;
  std::unique_ptr<v1::TesseraAdmin::Stub> stub_;
};

}  // namespace tessera::cli
