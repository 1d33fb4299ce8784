// `HeapCharge` claims heap memory of the daemon for a tenant. The bytes count against the tenant's
// limit and against the node's memory, like bytes of the pool: otherwise a tenant could make the
// daemon store more than its limit by objects that hold no rows.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

class HeapCharge {
 public:
  // `tenant` has the tenant's limit, and `node` is the account of the node's memory.
  struct Accounts {
    pool::Account* tenant = nullptr;
    pool::Account* node = nullptr;
  };

  HeapCharge() = default;
  // RESOURCE_EXHAUSTED if one of the accounts has no room.
  static absl::StatusOr<HeapCharge> Reserve(const Accounts& accounts, pool::MemoryTag tag,
                                            std::uint64_t bytes) {
    HeapCharge charge;
    absl::StatusOr<pool::Charge> tenant = accounts.tenant->Reserve(tag, bytes);
    if (!tenant.ok()) return tenant.status();
    charge.tenant_ = *std::move(tenant);
    absl::StatusOr<pool::Charge> node = accounts.node->Reserve(tag, bytes);
    if (!node.ok()) return node.status();
    charge.node_ = *std::move(node);
    return charge;
  }

  std::uint64_t bytes() const { return tenant_.bytes(); }
  void Reset() {
    tenant_.Reset();
    node_.Reset();
  }

 private:
  pool::Charge tenant_;
  pool::Charge node_;
};

}  // namespace tessera::cache
