// How many calls of workers run at a time. Each has a thread of gRPC's, of which there are so many
// for all tenants: where half of them are taken, no tenant gets more than its part.
//
// Those that may take long wait in lines before that (admission.h); here is whoever waits for a
// sequence that is moved, or for memory.
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

// Thread-safe. Outlives its places.
class Calls {
 public:
  // Far more than Admission lets in; and for each tenant the places and the lines that it keeps:
  // one of each, twice.
  static constexpr std::uint32_t MostFor(std::size_t tenants) {
    return 240 + 4 * static_cast<std::uint32_t>(tenants);
  }
  // What gRPC must have: while one tenant has half of the calls, each other may come to its part.
  // Beside them some wait for calls, and some are an operator's.
  static constexpr std::uint32_t ThreadsFor(std::size_t tenants) {
    return MostFor(tenants) + MostFor(tenants) / 2 + 32;
  }

  Calls(std::uint32_t most, std::size_t tenants)
      : most_(most),
        part_(std::max<std::uint32_t>(1, most / static_cast<std::uint32_t>(tenants))) {}

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

  // RESOURCE_EXHAUSTED where the tenant has its part, and half of all are taken.
  absl::StatusOr<Place> Enter(TenantId tenant) {
    MutexLock lock(mutex_);
    std::uint32_t& own = running_[tenant];
    if (own >= part_ && all_ >= most_ / 2) {
      return WithCause(
          absl::ResourceExhaustedError(
              Concat("the tenant has ", own, " calls under way; the limit is ", part_, " while ",
                     most_ / 2, " of all tenants or more are; retry when some have been answered")),
          ErrorCause::kOverloaded);
    }
    ++own;
    ++all_;
    return Place(this, tenant);
  }

 private:
  void Leave(TenantId tenant) {
    MutexLock lock(mutex_);
    --running_[tenant];
    --all_;
  }

  const std::uint32_t most_;
  const std::uint32_t part_;
  Mutex mutex_;
  std::uint32_t all_ TESSERA_GUARDED_BY(mutex_) = 0;  // the sum of what runs
  std::map<TenantId, std::uint32_t> running_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
