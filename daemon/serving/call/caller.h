// Caller: the tenant and the session of a request, found by its session key.
#pragma once

#include <grpcpp/server_context.h>

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/cache/tenant/node.h"
#include "tessera/v1/common.pb.h"

namespace tessera::serving {

struct Caller {
  cache::Tenant* tenant;
  std::shared_ptr<cache::SessionState> session;
  const grpc::ServerContextBase* context = nullptr;

  // Whether the call was cancelled or its deadline has passed.
  bool cancelled() const { return context != nullptr && context->IsCancelled(); }
};

inline absl::StatusOr<Caller> FindCaller(const cache::Node& node, const v1::SessionKey& key) {
  cache::Tenant* tenant = node.TenantOf(key.session_id());
  if (tenant == nullptr) {
    return absl::UnauthenticatedError("session " + std::to_string(key.session_id()) +
                                      " is not attached here, or its key is wrong");
  }
  absl::StatusOr<std::shared_ptr<cache::SessionState>> session =
      tenant->FindSession(SessionId(key.session_id()), key.secret());
  if (!session.ok()) return session.status();
  return Caller{tenant, *std::move(session)};
}

}  // namespace tessera::serving
