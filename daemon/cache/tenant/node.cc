#include "daemon/cache/tenant/node.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/random.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

Node::Node(const Options& options)
    : options_(options),
      instance_(NewSecret64()),
      account_("node", options.memory_bytes, nullptr, ErrorCause::kPoolFull),
      host_rows_("rows in host memory", options.raw_copy_bytes, nullptr, ErrorCause::kHostMemory),
      objects_("objects of all tenants", 0),
      host_tier_(options.host_tier_bytes) {}

absl::StatusOr<std::unique_ptr<Node>> Node::Create(const Options& options) {
  std::unique_ptr<Node> node(new Node(options));
  if (absl::Status status = node->SetTenants(options.tenants); !status.ok()) return status;
  return node;
}

absl::StatusOr<std::unique_ptr<Tenant>> Node::NewTenant(std::size_t index,
                                                        const TenantOptions& options) {
  Tenant::Options tenant = options_.tenant_template;
  tenant.id = TenantId(index + 1);
  tenant.name = options.name;
  tenant.hard_limit_bytes = options.hard_limit_bytes;
  tenant.objects = &objects_;
  tenant.host_tier = &host_tier_;
  tenant.instance = instance_;
  tenant.node = &account_;
  tenant.guarantees = &guarantees_;
  tenant.host_rows = &host_rows_;
  tenant.device = options_.device;
  tenant.directory_memory = &directory_memory_;
  // Reserve address space for all memory the node may hold, in whole extents.
  const std::uint64_t extents = std::min<std::uint64_t>(
      options_.memory_bytes / tenant.pool_extent_bytes + 1, shm::kMaxPoolExtents);
  tenant.pool_limit_bytes = extents * tenant.pool_extent_bytes;
  absl::StatusOr<std::unique_ptr<Tenant>> created = Tenant::Create(tenant);
  if (created.ok()) return created;
  return absl::Status(created.status().code(),
                      Concat("tenant ", options.name, ": ", created.status().message()));
}

absl::Status Node::SetTenants(const std::vector<TenantOptions>& tenants) {
  MutexLock set_lock(set_mutex_);
  const std::size_t known = count_.load(std::memory_order_relaxed);
  const auto is_new = [this](const TenantOptions& wanted) {
    return TenantByName(wanted.name) == nullptr;
  };
  const auto count_new = std::count_if(tenants.begin(), tenants.end(), is_new);
  if (known + static_cast<std::size_t>(count_new) > kMaxTenants) {
    return absl::ResourceExhaustedError(
        Concat(count_new, " tenants would be added to ", known, "; the limit is ", kMaxTenants,
               " tenants, and removed ones count until the daemon restarts"));
  }
  std::vector<std::unique_ptr<Tenant>> added;
  std::vector<Tenant*> found;  // of `tenants`, in its order
  for (const TenantOptions& wanted : tenants) {
    Tenant* tenant = TenantByName(wanted.name);
    if (tenant == nullptr) {
      absl::StatusOr<std::unique_ptr<Tenant>> created = NewTenant(known + added.size(), wanted);
      if (!created.ok()) return created.status();
      added.push_back(*std::move(created));
      tenant = added.back().get();
    }
    found.push_back(tenant);
  }
  // Nothing fails from here on.
  for (std::size_t i = 0; i < tenants.size(); ++i) {
    // Equal shares, so that one tenant's idle sequences cannot crowd out another's.
    found[i]->SetLimits({.soft_bytes = tenants[i].soft_limit_bytes,
                         .hard_bytes = tenants[i].hard_limit_bytes,
                         .host_rows_bytes = options_.raw_copy_bytes / tenants.size(),
                         .host_tier_bytes = options_.host_tier_bytes / tenants.size()});
  }
  std::size_t next = known;
  for (std::unique_ptr<Tenant>& tenant : added) tenants_[next++] = std::move(tenant);
  count_.store(next, std::memory_order_release);
  for (std::size_t i = 0; i < next; ++i) guarantees_.Set(i, 0);  // of closed tenants
  for (std::size_t i = 0; i < tenants.size(); ++i) {
    guarantees_.Set(found[i]->options().id.value() - 1, tenants[i].reserved_bytes);
  }
  std::vector<Tenant*> idle;  // closed, and without a session
  {
    MutexLock lock(mutex_);
    for (Entry& entry : entries_) entry.token.reset();
    const auto share = static_cast<std::uint32_t>(
        std::max<std::size_t>(1, options_.max_sessions / (2 * tenants.size())));
    for (std::size_t i = 0; i < tenants.size(); ++i) {
      Entry& entry = EntryOf(*found[i]);
      entry.token = tenants[i].token;
      entry.max_sessions = tenants[i].max_sessions;
      entry.guaranteed = entry.max_sessions == 0 ? share : std::min(share, entry.max_sessions);
    }
    for (const std::unique_ptr<Tenant>& tenant : this->tenants()) {
      const Entry& entry = EntryOf(*tenant);
      if (!entry.open() && entry.sessions == 0) idle.push_back(tenant.get());
    }
  }
  for (Tenant* tenant : idle) FreePrefixes(*tenant);
  return absl::OkStatus();
}

void Node::FreePrefixes(Tenant& tenant) {
  for (const PrefixStore::Description& prefix : tenant.prefixes().List()) {
    (void)tenant.prefixes().Free(prefix.prefix->id());
  }
}

absl::StatusOr<Tenant*> Node::TenantByToken(std::string_view token) const {
  Tenant* found = nullptr;
  const std::span<const std::unique_ptr<Tenant>> tenants = this->tenants();
  MutexLock lock(mutex_);
  // Compare every token, so that timing does not reveal which one matched.
  for (const std::unique_ptr<Tenant>& tenant : tenants) {
    const Entry& entry = EntryOf(*tenant);
    if (entry.open() && SecretsEqual(token, *entry.token)) found = tenant.get();
  }
  if (found == nullptr) {
    return absl::PermissionDeniedError(token.empty()
                                           ? "this daemon requires a tenant token; send one"
                                           : "the tenant token is not known to this daemon");
  }
  return found;
}

Tenant* Node::TenantOf(std::uint64_t id) const {
  const std::uint64_t index = id >> 48;
  const std::span<const std::unique_ptr<Tenant>> tenants = this->tenants();
  return index >= 1 && index <= tenants.size() ? tenants[index - 1].get() : nullptr;
}

Tenant* Node::TenantByName(std::string_view name) const {
  const std::span<const std::unique_ptr<Tenant>> tenants = this->tenants();
  const auto it = std::find_if(tenants.begin(), tenants.end(),
                               [&](const auto& tenant) { return tenant->name() == name; });
  return it == tenants.end() ? nullptr : it->get();
}

std::uint32_t Node::SumOfSessions() const {
  return std::accumulate(
      entries_.begin(), entries_.end(), 0u,
      [](std::uint32_t sum, const Entry& entry) { return sum + entry.sessions; });
}

absl::Status Node::AdmitSession(const Tenant& tenant) {
  MutexLock lock(mutex_);
  Entry& own = EntryOf(tenant);
  if (!own.open()) {
    return absl::PermissionDeniedError(
        Concat("tenant ", tenant.name(), " was removed from this daemon's configuration"));
  }
  if (own.max_sessions != 0 && own.sessions >= own.max_sessions) {
    return WithCause(
        absl::ResourceExhaustedError(Concat("tenant ", tenant.name(), " has ", own.sessions,
                                            " sessions; its limit is ", own.max_sessions,
                                            "; retry when one has ended, or raise max_sessions of "
                                            "the tenant")),
        ErrorCause::kQuota);
  }
  const std::uint32_t all = SumOfSessions();
  std::uint32_t kept = 0;  // for other tenants, unless this one is owed a session itself
  if (own.unused() == 0) {
    for (const Entry& entry : entries_) kept += entry.unused();
  }
  if (all + kept < options_.max_sessions) {
    ++own.sessions;
    return absl::OkStatus();
  }
  if (kept == 0) {
    return WithCause(absl::ResourceExhaustedError(
                         Concat(all, " sessions are attached; the limit is ", options_.max_sessions,
                                "; retry when a session has ended, or raise max_sessions")),
                     ErrorCause::kQuota);
  }
  return WithCause(absl::ResourceExhaustedError(Concat(
                       "tenant ", tenant.name(), " has ", own.sessions,
                       " sessions; its limit is now ", own.sessions, ": of ", options_.max_sessions,
                       " on this node, ", all - own.sessions, " belong to other tenants and ", kept,
                       " are reserved for other tenants; retry later, or raise max_sessions")),
                   ErrorCause::kQuota);
}

void Node::SessionEnded(Tenant& tenant) {
  {
    MutexLock lock(mutex_);
    Entry& entry = EntryOf(tenant);
    --entry.sessions;
    if (entry.open() || entry.sessions != 0) return;
  }
  MutexLock set_lock(set_mutex_);  // the tenant stays closed while its prefixes are freed
  {
    MutexLock lock(mutex_);
    const Entry& entry = EntryOf(tenant);
    if (entry.open() || entry.sessions != 0) return;  // it was opened again before the lock
  }
  FreePrefixes(tenant);
}

std::uint32_t Node::sessions() const {
  MutexLock lock(mutex_);
  return SumOfSessions();
}

}  // namespace tessera::cache
