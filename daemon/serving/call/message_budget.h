// MessageBudget limits the memory that messages of workers may use at a time: requests until they
// are handled, and answers until they are sent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"

namespace tessera::serving {

// Thread-safe. Must outlive its charges. Once half of the bytes are in use, no tenant gets more
// than its equal part.
class MessageBudget {
 public:
  MessageBudget(std::uint64_t bytes, std::size_t tenants) : bytes_(bytes), part_(PartOf(tenants)) {}

  void SetTenants(std::size_t tenants) {
    MutexLock lock(mutex_);
    part_ = PartOf(tenants);
  }

  // Bytes that a tenant uses; given back at the end.
  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)),
          tenant_(other.tenant_),
          bytes_(std::exchange(other.bytes_, 0)) {}
    Charge& operator=(Charge&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(tenant_, other.tenant_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Charge() { Reset(); }

    std::uint64_t bytes() const { return bytes_; }
    void Reset() {
      if (MessageBudget* budget = std::exchange(budget_, nullptr)) budget->Free(tenant_, bytes_);
      bytes_ = 0;
    }

   private:
    friend class MessageBudget;
    Charge(MessageBudget* budget, TenantId tenant, std::uint64_t bytes)
        : budget_(budget), tenant_(tenant), bytes_(bytes) {}
    MessageBudget* budget_ = nullptr;
    TenantId tenant_;
    std::uint64_t bytes_ = 0;
  };

  // RESOURCE_EXHAUSTED if the tenant would have more than it may.
  absl::StatusOr<Charge> Take(TenantId tenant, std::uint64_t bytes) {
    MutexLock lock(mutex_);
    if (MayHave(tenant, bytes)) return Use(tenant, bytes);
    return WithCause(
        absl::ResourceExhaustedError(Concat(
            "messages of the tenant use ", used_[tenant], " bytes, and this one needs ", bytes,
            "; the limit is ", LimitOf(tenant), " now; send it again when other calls have ended")),
        ErrorCause::kOverloaded);
  }
  // For memory that is in use whatever the limit: the tenant gets nothing more until it is freed.
  Charge TakeAnyway(TenantId tenant, std::uint64_t bytes) {
    MutexLock lock(mutex_);
    return Use(tenant, bytes);
  }
  // Changes what the tenant uses by now - before. False, and unchanged, if it may not have so much.
  bool Adjust(TenantId tenant, std::uint64_t before, std::uint64_t now) {
    MutexLock lock(mutex_);
    if (now > before && !MayHave(tenant, now - before)) return false;
    used_[tenant] += now - before;
    all_ += now - before;
    return true;
  }

 private:
  std::uint64_t PartOf(std::size_t tenants) const {
    return bytes_ / std::max<std::size_t>(1, tenants);
  }
  std::uint64_t LimitOf(TenantId tenant) TESSERA_REQUIRES(mutex_) {
    const std::uint64_t others = all_ - used_[tenant];
    return std::max(part_, bytes_ / 2 - std::min(others, bytes_ / 2));
  }
  bool MayHave(TenantId tenant, std::uint64_t bytes) TESSERA_REQUIRES(mutex_) {
    return used_[tenant] + bytes <= LimitOf(tenant);
  }
  Charge Use(TenantId tenant, std::uint64_t bytes) TESSERA_REQUIRES(mutex_) {
    used_[tenant] += bytes;
    all_ += bytes;
    return Charge(this, tenant, bytes);
  }
  void Free(TenantId tenant, std::uint64_t bytes) {
    MutexLock lock(mutex_);
    used_[tenant] -= bytes;
    all_ -= bytes;
  }

  const std::uint64_t bytes_;
  Mutex mutex_;
  std::uint64_t part_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t all_ TESSERA_GUARDED_BY(mutex_) = 0;  // sum over used_
  std::map<TenantId, std::uint64_t> used_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
