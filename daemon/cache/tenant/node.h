// `Node` is everything the daemon holds: the node's memory budget and its tenants. Tenants are only
// ever added, so finding one takes no lock.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/config/limits.h"
#include "daemon/device/host_memory.h"
#include "daemon/pool/account.h"
#include "daemon/pool/guarantees.h"

namespace tessera::cache {

class Node {
 public:
  struct TenantOptions {
    std::string name;
    std::string token;
    std::uint64_t hard_limit_bytes = 0;
    std::uint64_t soft_limit_bytes = 0;
    std::uint64_t reserved_bytes = 0;  // of memory_bytes, which no other tenant can take
    std::uint32_t max_sessions = 0;    // 0: only the node's limit applies
  };
  struct Options {
    std::uint64_t memory_bytes = 0;  // bound on all pools, directories, tails and staging arenas
    // Host memory for rows that wait for a strategy; a separate budget from memory_bytes.
    std::uint64_t raw_copy_bytes = 0;
    // Host memory for offloaded sequences; a separate budget. 0 disables the host tier.
    std::uint64_t host_tier_bytes = 0;
    device::Device* device = nullptr;    // must outlive the node
    std::vector<TenantOptions> tenants;  // at start
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
  // All tenants, in the order of their ids; closed ones included.
  std::span<const std::unique_ptr<Tenant>> tenants() const {
    return {tenants_.data(), count_.load(std::memory_order_acquire)};
  }

  // Replaces tokens and limits by those of `tenants`, all or nothing. A tenant that is not known by
  // name is added. A known one that is missing in `tenants` is closed: it admits no session, its
  // sessions go on, and when the last has ended, its prefixes are freed. A later call can open it
  // again. RESOURCE_EXHAUSTED if there is no room or no memory for a new tenant. Thread-safe.
  absl::Status SetTenants(const std::vector<TenantOptions>& tenants);

  // Returns PERMISSION_DENIED if no open tenant has this token.
  absl::StatusOr<Tenant*> TenantByToken(std::string_view token) const;
  // Finds the tenant that issued an id (session, sequence or model); null if there is none.
  Tenant* TenantOf(std::uint64_t id) const;
  Tenant* TenantByName(std::string_view name) const;

  // Counts a new session until SessionEnded is called. Returns RESOURCE_EXHAUSTED beyond
  // max_sessions, which all tenants share, and beyond the tenant's own limit. Each open tenant is
  // guaranteed the half of an equal share, at least one session, that others cannot take.
  // PERMISSION_DENIED if the tenant was closed.
  absl::Status AdmitSession(const Tenant& tenant);
  void SessionEnded(Tenant& tenant);
  std::uint32_t sessions() const;

 private:
  static constexpr std::size_t kMaxTenants = config::kTenants.max;
  // What belongs to a tenant here. A closed tenant has no token.
  struct Entry {
    std::optional<std::string> token;
    std::uint32_t sessions = 0;
    std::uint32_t guaranteed = 0;    // sessions
    std::uint32_t max_sessions = 0;  // 0: only the node's limit applies
    std::uint32_t unused() const {
      return open() ? guaranteed - std::min(guaranteed, sessions) : 0;
    }
    bool open() const { return token.has_value(); }
  };
  explicit Node(const Options& options);
  absl::StatusOr<std::unique_ptr<Tenant>> NewTenant(std::size_t index,
                                                    const TenantOptions& options);
  const Entry& EntryOf(const Tenant& tenant) const TESSERA_REQUIRES(mutex_) {
    return entries_[tenant.options().id.value() - 1];
  }
  Entry& EntryOf(const Tenant& tenant) TESSERA_REQUIRES(mutex_) {
    return entries_[tenant.options().id.value() - 1];
  }
  std::uint32_t SumOfSessions() const TESSERA_REQUIRES(mutex_);
  static void FreePrefixes(Tenant& tenant);

  const Options options_;
  const std::uint64_t instance_;
  pool::Account account_;
  pool::Account host_rows_;
  pool::Account objects_;
  pool::Guarantees guarantees_{&account_};
  tiers::HostTier host_tier_;
  device::HostMemorySource directory_memory_{"tessera-directory"};
  Mutex set_mutex_;      // tenants are opened and closed under it; taken before mutex_
  mutable Mutex mutex_;  // leaf lock
  std::array<Entry, kMaxTenants> entries_ TESSERA_GUARDED_BY(mutex_);  // indexed by tenant
  // The first count_ are published and never change.
  std::array<std::unique_ptr<Tenant>, kMaxTenants> tenants_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace tessera::cache
