// Everything the daemon holds: the node's memory budget and its tenants. Constant after start, so
// finding a tenant takes no lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/device/host_memory.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

class Node {
 public:
  struct TenantOptions {
    std::string name;
    std::string token;
    std::uint64_t hard_limit_bytes = 0;
    std::uint64_t soft_limit_bytes = 0;
  };
  struct Options {
    std::uint64_t memory_bytes = 0;  // of all pools, directories, tails and staging arenas
    // Of rows that wait for a strategy of their own: host memory, beside the above.
    std::uint64_t raw_copy_bytes = 0;
    // Of sequences that were offloaded: likewise. 0: there is no host tier.
    std::uint64_t host_tier_bytes = 0;
    device::Device* device = nullptr;  // outlives the node
    std::vector<TenantOptions> tenants;
    // The rest of each tenant's options: id, name, token and limits are filled in.
    Tenant::Options tenant_template;
    std::uint32_t max_sessions = 0;
  };
  static absl::StatusOr<std::unique_ptr<Node>> Create(const Options& options);

  const Options& options() const { return options_; }
  std::uint64_t instance() const { return instance_; }
  const pool::Account& account() const { return account_; }
  pool::Account& account() { return account_; }
  const pool::Account& host_rows() const { return host_rows_; }
  // What the objects of all tenants use, however their extents are filled.
  pool::Account& objects() { return objects_; }
  const tiers::HostTier& host_tier() const { return host_tier_; }
  const std::vector<std::unique_ptr<Tenant>>& tenants() const { return tenants_; }

  // PERMISSION_DENIED where no tenant has this token.
  absl::StatusOr<Tenant*> TenantByToken(std::string_view token) const;
  // By an id that a tenant handed out (session, sequence or model); null where there is none.
  Tenant* TenantOf(std::uint64_t id) const;
  Tenant* TenantByName(std::string_view name) const;

  // RESOURCE_EXHAUSTED beyond max_sessions, of all tenants together; one place is kept for each
  // other tenant that has none. Counted from here on: until SessionEnded.
  absl::Status AdmitSession(const Tenant& tenant);
  void SessionEnded(const Tenant& tenant);
  std::uint32_t sessions() const;

 private:
  explicit Node(const Options& options);

  const Options options_;
  const std::uint64_t instance_;
  pool::Account account_;
  pool::Account host_rows_;
  pool::Account objects_;
  tiers::HostTier host_tier_;
  device::HostMemorySource directory_memory_{"tessera-directory"};
  mutable Mutex sessions_mutex_;                                             // a leaf
  std::vector<std::uint32_t> sessions_ TESSERA_GUARDED_BY(sessions_mutex_);  // by tenant
  std::vector<std::unique_ptr<Tenant>> tenants_;
};

}  // namespace tessera::cache
