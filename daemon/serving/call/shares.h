// Shares divides something between the tenants: places of calls, bytes of messages, connections.
// A tenant may take what others leave, but once half of all is in use, no tenant gets more than its
// equal part.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"

namespace tessera::serving {

// Thread-safe. Must outlive what is held of it.
class Shares {
 public:
  struct Options {
    std::string_view what;  // for messages, as in "calls running"
    std::uint64_t most;     // of all tenants
    std::size_t tenants;
    std::uint64_t least_part = 1;  // of a tenant, even if the parts are then more than `most`
  };
  explicit Shares(const Options& options) : options_(options), part_(PartOf(options.tenants)) {}

  // A reload has changed the number of tenants.
  void SetTenants(std::size_t tenants) {
    MutexLock lock(mutex_);
    part_ = PartOf(tenants);
  }

  // What a tenant has; given back at the end.
  class Held {
   public:
    Held() = default;
    Held(Held&& other) noexcept
        : shares_(std::exchange(other.shares_, nullptr)),
          tenant_(other.tenant_),
          amount_(other.amount_) {}
    Held& operator=(Held&& other) noexcept {
      std::swap(shares_, other.shares_);
      std::swap(tenant_, other.tenant_);
      std::swap(amount_, other.amount_);
      return *this;
    }
    ~Held() { Reset(); }
    void Reset() {
      if (Shares* const shares = std::exchange(shares_, nullptr)) {
        (void)shares->Adjust(tenant_, amount_, 0);
      }
    }

   private:
    friend class Shares;
    Held(Shares* shares, TenantId tenant, std::uint64_t amount)
        : shares_(shares), tenant_(tenant), amount_(amount) {}
    Shares* shares_ = nullptr;
    TenantId tenant_;
    std::uint64_t amount_ = 0;
  };

  // RESOURCE_EXHAUSTED if the tenant would have more than it may.
  absl::StatusOr<Held> Take(TenantId tenant, std::uint64_t amount = 1) {
    MutexLock lock(mutex_);
    if (MayHave(tenant, amount)) return Use(tenant, amount);
    return WithCause(absl::ResourceExhaustedError(Concat(
                         "the tenant has ", used_[tenant], " ", options_.what, " and asks for ",
                         amount, " more; the limit is ", LimitOf(tenant), " now; retry later")),
                     ErrorCause::kOverloaded);
  }
  // For what is there whatever the limit: the tenant gets nothing more until it is given back.
  Held TakeAnyway(TenantId tenant, std::uint64_t amount) {
    MutexLock lock(mutex_);
    return Use(tenant, amount);
  }
  // Changes what the tenant has by now - before. False, and unchanged, if it may not have so much.
  bool Adjust(TenantId tenant, std::uint64_t before, std::uint64_t now) {
    MutexLock lock(mutex_);
    if (now > before && !MayHave(tenant, now - before)) return false;
    used_[tenant] += now - before;
    all_ += now - before;
    return true;
  }
  // Whether the tenant has half of what it may have, or more.
  bool OverHalf(TenantId tenant) {
    MutexLock lock(mutex_);
    return used_[tenant] >= LimitOf(tenant) / 2;
  }

 private:
  std::uint64_t PartOf(std::size_t tenants) const {
    return std::max<std::uint64_t>(options_.least_part,
                                   options_.most / std::max<std::size_t>(1, tenants));
  }
  std::uint64_t LimitOf(TenantId tenant) TESSERA_REQUIRES(mutex_) {
    const std::uint64_t half = options_.most / 2;
    return std::max(part_, half - std::min(all_ - used_[tenant], half));
  }
  bool MayHave(TenantId tenant, std::uint64_t amount) TESSERA_REQUIRES(mutex_) {
    return used_[tenant] + amount <= LimitOf(tenant);
  }
  Held Use(TenantId tenant, std::uint64_t amount) TESSERA_REQUIRES(mutex_) {
    used_[tenant] += amount;
    all_ += amount;
    return Held(this, tenant, amount);
  }

  const Options options_;
  Mutex mutex_;
  std::uint64_t part_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t all_ TESSERA_GUARDED_BY(mutex_) = 0;  // sum over used_
  std::map<TenantId, std::uint64_t> used_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
