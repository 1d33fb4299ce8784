// Calls limits the number of worker calls that run at a time, because each uses a gRPC thread. Once
// half of all places are taken, no tenant gets more than its share.
//
// Admission (admission.h) additionally limits long calls. This class covers all calls, including
// those that wait for memory or for a sequence that is being moved.
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

// Thread-safe. Must outlive its places.
class Calls {
 public:
  // Places for all tenants. 240 is far more than Admission admits; each tenant adds two for running
  // and two for waiting long calls.
  static constexpr std::uint32_t MaxCallsFor(std::size_t tenants) {
    return 240 + 4 * static_cast<std::uint32_t>(tenants);
  }
  // Threads that gRPC needs: one tenant may have half of the places while the others reach their
  // shares. The rest polls for calls and serves the operator.
  static constexpr std::uint32_t ThreadsFor(std::size_t tenants) {
    return MaxCallsFor(tenants) + MaxCallsFor(tenants) / 2 + 32;
  }

  Calls(std::uint32_t most, std::size_t tenants) : most_(most), part_(PartOf(tenants)) {}

  // A reload has added tenants: the places are the same, and the shares become smaller.
  void SetTenants(std::size_t tenants) {
    MutexLock lock(mutex_);
    part_ = PartOf(tenants);
  }

  // A call may run while it holds a Place.
  class Place {
   public:
    Place(Calls* calls, TenantId tenant) : calls_(calls), tenant_(tenant) {}
    Place(Place&& other) noexcept
        : calls_(std::exchange(other.calls_, nullptr)), tenant_(other.tenant_) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (calls_ != nullptr) calls_->Leave(tenant_);
    }

   private:
    Calls* calls_;
    TenantId tenant_;
  };

  // RESOURCE_EXHAUSTED if half of all places are taken and the tenant has its share.
  absl::StatusOr<Place> Enter(TenantId tenant) {
    MutexLock lock(mutex_);
    std::uint32_t& own = running_[tenant];
    if (own >= part_ && all_ >= most_ / 2) {
      return WithCause(absl::ResourceExhaustedError(Concat(
                           "the tenant has ", own, " calls running; the limit is ", part_,
                           " while ", most_ / 2, " or more calls of all tenants run; retry later")),
                       ErrorCause::kOverloaded);
    }
    ++own;
    ++all_;
    return Place(this, tenant);
  }

 private:
  std::uint32_t PartOf(std::size_t tenants) const {
    return std::max<std::uint32_t>(1, most_ / static_cast<std::uint32_t>(tenants));
  }
  void Leave(TenantId tenant) {
    MutexLock lock(mutex_);
    --running_[tenant];
    --all_;
  }

  const std::uint32_t most_;
  Mutex mutex_;
  std::uint32_t part_ TESSERA_GUARDED_BY(mutex_);     // of most_, for each tenant
  std::uint32_t all_ TESSERA_GUARDED_BY(mutex_) = 0;  // sum over running_
  std::map<TenantId, std::uint32_t> running_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
