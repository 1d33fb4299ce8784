// Client of the TesseraAdmin service, with errors that tell an operator what to do next.
#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/tools/connection.h"
#include "tessera/v1/admin.grpc.pb.h"

namespace tessera::cli {

// One connection to one daemon. Calls block; every call but Compress, Offload and Restore times out
// after `patience`.
class Admin {
 public:
  static absl::StatusOr<Admin> At(Door door,
                                  std::chrono::seconds patience = std::chrono::seconds(5));

  absl::StatusOr<v1::StatsResponse> Stats();
  absl::StatusOr<v1::ListSessionsResponse> Sessions();
  absl::StatusOr<v1::ListSequencesResponse> Sequences(std::uint32_t limit);
  absl::StatusOr<v1::ListPrefixesResponse> Prefixes(std::uint32_t limit);
  absl::StatusOr<v1::DescribeResponse> Describe(std::uint64_t sequence);
  // No timeout.
  absl::StatusOr<v1::CompressResponse> Compress(std::uint64_t sequence);
  absl::StatusOr<v1::SetPolicyResponse> SetPolicy(std::uint64_t sequence,
                                                  const std::string& policy);
  absl::StatusOr<v1::OffloadResponse> Offload(std::uint64_t sequence);
  absl::StatusOr<v1::RestoreResponse> Restore(std::uint64_t sequence);
  absl::Status Evict(std::uint64_t sequence);
  absl::StatusOr<v1::DrainResponse> Drain(std::uint64_t limit_ms);
  absl::StatusOr<v1::ReloadResponse> Reload();

 private:
  Admin(Door door, std::chrono::seconds patience, const std::shared_ptr<grpc::Channel>& channel)
      : door_(std::move(door)), patience_(patience), stub_(v1::TesseraAdmin::NewStub(channel)) {}

  enum class Timeout : bool { kNo, kYes };
  // `call(context, response)` makes the call.
  template <typename Response, typename Call>
  absl::StatusOr<Response> Run(Call call, Timeout timeout = Timeout::kYes) const;

  Door door_;
  std::chrono::seconds patience_;
  std::unique_ptr<v1::TesseraAdmin::Stub> stub_;
};

}  // namespace tessera::cli
