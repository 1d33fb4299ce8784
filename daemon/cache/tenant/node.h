// `Node` is everything the daemon holds: the node's memory budget and its tenants. The tenant list
// is fixed after start, so finding a tenant takes no lock.
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
    std::uint64_t memory_bytes = 0;  // bound on all pools, directories, tails and staging arenas
    // Host memory for rows that wait for a strategy; a separate budget from memory_bytes.
    std::uint64_t raw_copy_bytes = 0;
    // Host memory for offloaded sequences; a separate budget. 0 disables the host tier.
    std::uint64_t host_tier_bytes = 0;
    device::Device* device = nullptr;  // must outlive the node
    std::vector<TenantOptions> tenants;
    // Template for each tenant's options; id, name, token and limits are filled in.
    Tenant::Options tenant_template;
    std::uint32_t max_sessions = 0;
  };
  static absl::StatusOr<std::unique_ptr<Node>> Create(const Options& options);

  const Options& options() const { return options_; }
  std::uint64_t instance() const { return instance_; }
  const pool::Account& account() const { return account_; }
  pool::Account& account() { return account_; }
  const pool::Account& host_rows() const { return host_rows_; }
  // Bytes used by objects of all tenants, regardless of how full their extents are.
  pool::Account& objects() { return objects_; }
  const tiers::HostTier& host_tier() const { return host_tier_; }
  const std::vector<std::unique_ptr<Tenant>>& tenants() const { return tenants_; }

  // Returns PERMISSION_DENIED if no tenant has this token.
  absl::StatusOr<Tenant*> TenantByToken(std::string_view token) const;
  // Finds the tenant that issued an id (session, sequence or model); null if there is none.
  Tenant* TenantOf(std::uint64_t id) const;
  Tenant* TenantByName(std::string_view name) const;

  // Counts a new session until SessionEnded is called. Returns RESOURCE_EXHAUSTED beyond
  // max_sessions, which all tenants share; one slot is reserved for each other tenant that has no
  // session yet.
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
  mutable Mutex sessions_mutex_;                                             // leaf lock
  std::vector<std::uint32_t> sessions_ TESSERA_GUARDED_BY(sessions_mutex_);  // indexed by tenant
  std::vector<std::unique_ptr<Tenant>> tenants_;
};

}  // namespace tessera::cache
