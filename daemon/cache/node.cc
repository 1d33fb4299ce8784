#include "daemon/cache/node.h"

#include <algorithm>
#include <utility>

#include "daemon/base/random.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

Node::Node(const Options& options)
    : options_(options),
      instance_(NewSecret64()),
      account_("node", options.memory_bytes),
      raw_copies_("raw copies", options.raw_copy_bytes),
      objects_("objects of all tenants", 0),
      host_tier_(options.host_tier_bytes) {}

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
    tenant.instance = node->instance_;
    tenant.node = &node->account_;
    tenant.raw_copies = &node->raw_copies_;
    tenant.device = options.device;
    tenant.directory_memory = &node->directory_memory_;
    // Address space for everything the node may hold, in whole extents.
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
  // Every token is compared, so that the time tells nothing about which one matched.
  for (const std::unique_ptr<Tenant>& tenant : tenants_) {
    if (SecretsEqual(token, tenant->options().token)) found = tenant.get();
  }
  if (found == nullptr) {
    return absl::PermissionDeniedError(token.empty()
                                           ? "this daemon has no tenant without a token; send one"
                                           : "no tenant has this token");
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
  const std::size_t others = tenants_.size() - 1;
  const std::size_t most = options_.max_sessions > others ? options_.max_sessions - others : 1;
  if (const std::size_t held = tenant.session_count(); held >= most) {
    return absl::ResourceExhaustedError(Concat("tenant ", tenant.name(), " has ", held,
                                               " sessions; the limit is ", most, ", of ",
                                               options_.max_sessions, " on this node"));
  }
  const std::uint32_t before = sessions_.fetch_add(1, std::memory_order_relaxed);
  if (before < options_.max_sessions) return absl::OkStatus();
  sessions_.fetch_sub(1, std::memory_order_relaxed);
  return absl::ResourceExhaustedError(
      Concat(before, " sessions are attached; the limit is ", options_.max_sessions));
}

void Node::SessionEnded() { sessions_.fetch_sub(1, std::memory_order_relaxed); }

}  // namespace tessera::cache
