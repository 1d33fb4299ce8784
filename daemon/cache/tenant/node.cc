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
      host_tier_(options.host_tier_bytes),
      sessions_(options.tenants.size()) {}

absl::StatusOr<std::unique_ptr<Node>> Node::Create(const Options& options) {
  std::unique_ptr<Node> node(new Node(options));
  for (const TenantOptions& configured : options.tenants) {
    Tenant::Options tenant = options.tenant_template;
    tenant.id = TenantId(node->tenants_.size() + 1);
    tenant.name = configured.name;
    tenant.token = configured.token;
    tenant.hard_limit_bytes = configured.hard_limit_bytes;
    tenant.soft_limit_bytes = configured.soft_limit_bytes;
    tenant.objects = &node->objects_;
    tenant.host_tier = &node->host_tier_;
    // Equal shares, so that one tenant's idle sequences cannot crowd out another's.
    tenant.host_tier_bytes = options.host_tier_bytes / options.tenants.size();
    tenant.instance = node->instance_;
    tenant.node = &node->account_;
    tenant.host_rows = &node->host_rows_;
    tenant.host_rows_bytes = options.raw_copy_bytes / options.tenants.size();
    tenant.device = options.device;
    tenant.directory_memory = &node->directory_memory_;
    // Reserve address space for all memory the node may hold, in whole extents.
    const std::uint64_t extents = std::min<std::uint64_t>(
        options.memory_bytes / tenant.pool_extent_bytes + 1, shm::kMaxPoolExtents);
    tenant.pool_limit_bytes = extents * tenant.pool_extent_bytes;
    absl::StatusOr<std::unique_ptr<Tenant>> created = Tenant::Create(tenant);
    if (!created.ok()) {
      return absl::Status(created.status().code(),
                          Concat("tenant ", configured.name, ": ", created.status().message()));
    }
    node->tenants_.push_back(*std::move(created));
  }
  return node;
}

absl::StatusOr<Tenant*> Node::TenantByToken(std::string_view token) const {
  Tenant* found = nullptr;
  // Compare every token, so that timing does not reveal which one matched.
  for (const std::unique_ptr<Tenant>& tenant : tenants_) {
    if (SecretsEqual(token, tenant->options().token)) found = tenant.get();
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
  return index >= 1 && index <= tenants_.size() ? tenants_[index - 1].get() : nullptr;
}

Tenant* Node::TenantByName(std::string_view name) const {
  const auto it = std::find_if(tenants_.begin(), tenants_.end(),
                               [&](const auto& tenant) { return tenant->name() == name; });
  return it == tenants_.end() ? nullptr : it->get();
}

absl::Status Node::AdmitSession(const Tenant& tenant) {
  MutexLock lock(sessions_mutex_);
  std::uint32_t& own = sessions_[tenant.options().id.value() - 1];
  const std::uint32_t all = std::accumulate(sessions_.begin(), sessions_.end(), 0u);
  // A tenant's first session uses the slot reserved for it.
  const auto kept =
      own == 0 ? 0u
               : static_cast<std::uint32_t>(std::count(sessions_.begin(), sessions_.end(), 0u));
  if (all + kept < options_.max_sessions) {
    ++own;
    return absl::OkStatus();
  }
  if (kept == 0) {
    return WithCause(absl::ResourceExhaustedError(
                         Concat(all, " sessions are attached; the limit is ", options_.max_sessions,
                                "; retry when a session has ended, or raise max_sessions")),
                     ErrorCause::kQuota);
  }
  return WithCause(
      absl::ResourceExhaustedError(Concat(
          "tenant ", tenant.name(), " has ", own, " sessions; its limit is now ", own, ": of ",
          options_.max_sessions, " on this node, ", all - own, " belong to other tenants and ",
          kept, " are reserved for tenants without one; retry later, or raise max_sessions")),
      ErrorCause::kQuota);
}

void Node::SessionEnded(const Tenant& tenant) {
  MutexLock lock(sessions_mutex_);
  --sessions_[tenant.options().id.value() - 1];
}

std::uint32_t Node::sessions() const {
  MutexLock lock(sessions_mutex_);
  return std::accumulate(sessions_.begin(), sessions_.end(), 0u);
}

}  // namespace tessera::cache
