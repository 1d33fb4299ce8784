// AdminService implements the operator's service (proto/tessera/v1/admin.proto).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/serving/attach/connections.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/admin.grpc.pb.h"

namespace tessera::serving {

// Owned by the Server. Thread-safe.
class AdminService final : public v1::TesseraAdmin::Service {
 public:
  // What a reload of the configuration has done, by field.
  struct Reloaded {
    std::vector<std::string> applied;
    std::vector<std::string> needs_restart;
  };
  struct Actions {
    // Starts a drain with a limit in milliseconds (0: the configured one).
    std::function<void(std::uint64_t)> drain;
    std::function<absl::StatusOr<Reloaded>()> reload;
  };
  AdminService(Services& services, Connections& connections, Actions actions)
      : services_(services), connections_(connections), actions_(std::move(actions)) {}

  grpc::Status ListSessions(grpc::ServerContext* context, const v1::ListSessionsRequest* request,
                            v1::ListSessionsResponse* response) override;
  grpc::Status ListSequences(grpc::ServerContext* context, const v1::ListSequencesRequest* request,
                             v1::ListSequencesResponse* response) override;
  grpc::Status ListPrefixes(grpc::ServerContext* context, const v1::ListPrefixesRequest* request,
                            v1::ListPrefixesResponse* response) override;
  grpc::Status Evict(grpc::ServerContext* context, const v1::EvictRequest* request,
                     v1::EvictResponse* response) override;
  grpc::Status ListPolicies(grpc::ServerContext* context, const v1::ListPoliciesRequest* request,
                            v1::ListPoliciesResponse* response) override;
  grpc::Status Describe(grpc::ServerContext* context, const v1::DescribeRequest* request,
                        v1::DescribeResponse* response) override;
  grpc::Status Compress(grpc::ServerContext* context, const v1::CompressRequest* request,
                        v1::CompressResponse* response) override;
  grpc::Status Offload(grpc::ServerContext* context, const v1::OffloadRequest* request,
                       v1::OffloadResponse* response) override;
  grpc::Status Restore(grpc::ServerContext* context, const v1::RestoreRequest* request,
                       v1::RestoreResponse* response) override;
  grpc::Status SetPolicy(grpc::ServerContext* context, const v1::SetPolicyRequest* request,
                         v1::SetPolicyResponse* response) override;
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;
  grpc::Status Reload(grpc::ServerContext* context, const v1::ReloadRequest* request,
                      v1::ReloadResponse* response) override;
  grpc::Status NodeStats(grpc::ServerContext* context, const v1::NodeStatsRequest* request,
                         v1::StatsResponse* response) override;

 private:
  absl::StatusOr<std::shared_ptr<cache::Sequence>> Find(std::uint64_t id) const;
  // Runs `act` with the sequence's rows in the pool. Retries after memory was reclaimed.
  absl::Status WithRows(grpc::ServerContext& context, std::uint64_t id,
                        absl::FunctionRef<absl::Status(const cache::Residence&)> act) const;
  // Acts and measures.
  template <typename Act>
  absl::Status Run(const char* method, const grpc::ServerContext& context, Act act);
  template <typename Act>
  grpc::Status Serve(const char* method, const grpc::ServerContext& context, Act act);
  // Serves a call that changes something, and writes an audit line. `object` is what it changes.
  template <typename Act>
  grpc::Status Change(const char* method, const grpc::ServerContext& context,
                      std::string_view object, Act act);

  Services& services_;
  Connections& connections_;
  const Actions actions_;
};

}  // namespace tessera::serving
