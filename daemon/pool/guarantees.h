// `Guarantees` keeps a part of an account free for each tenant: another tenant cannot take it, even
// while it is unused. What no tenant is guaranteed goes to whoever asks first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/pool/account.h"

namespace tessera::pool {

// Thread-safe. Tenants are numbered from 0; a number that was not set is guaranteed nothing.
class Guarantees {
 public:
  // `account` outlives this.
  explicit Guarantees(Account* account) : account_(account) {}

  // Bytes taken before stay, even if the guarantees of others no longer fit beside them.
  void Set(std::size_t tenant, std::uint64_t reserved_bytes) {
    MutexLock lock(mutex_);
    PartOf(tenant).reserved = reserved_bytes;
  }
  std::uint64_t reserved_bytes(std::size_t tenant) const {
    MutexLock lock(mutex_);
    return tenant < parts_.size() ? parts_[tenant].reserved : 0;
  }

 private:
  friend class Account;
  struct Part {
    std::uint64_t reserved = 0;
    std::uint64_t used = 0;
    std::uint64_t unused() const { return reserved - std::min(used, reserved); }
  };

  // Charges the account, of which the unused parts of other tenants are kept free unless the tenant
  // stays within its own part.
  absl::Status Take(std::size_t tenant, MemoryTag tag, std::uint64_t bytes) {
    MutexLock lock(mutex_);
    Part& own = PartOf(tenant);
    std::uint64_t kept = 0;
    if (bytes > own.unused()) {
      for (const Part& part : parts_) kept += part.unused();
      kept -= own.unused();
    }
    absl::Status status = account_->Take(tag, bytes, kept);
    if (status.ok()) own.used += bytes;
    return status;
  }
  void Return(std::size_t tenant, MemoryTag tag, std::uint64_t bytes) {
    MutexLock lock(mutex_);
    PartOf(tenant).used -= bytes;
    account_->Return(tag, bytes);
  }
  Part& PartOf(std::size_t tenant) TESSERA_REQUIRES(mutex_) {
    if (tenant >= parts_.size()) parts_.resize(tenant + 1);
    return parts_[tenant];
  }

  Account* const account_;
  mutable Mutex mutex_;
  std::vector<Part> parts_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::pool
