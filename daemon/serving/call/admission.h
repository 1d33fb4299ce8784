// Admission limits the number of long calls that run at a time. Further calls wait for a place, and
// are refused if too many of their tenant already wait. So long calls cannot take the threads that
// short calls need.
//
// Tenants do not block each other. A tenant without a running call enters at once, even above the
// limit, and each tenant has its own queue. A free place goes to the tenant with the fewest running
// calls.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"

namespace tessera::serving {

// Thread-safe. Must outlive its places.
class Admission {
 public:
  struct Options {
    std::string_view what;  // name of the calls, for messages
    std::uint32_t running;  // limit for all tenants together
    std::uint32_t waiting;  // limit per tenant
  };
  explicit Admission(const Options& options) : options_(options), waiting_(options.waiting) {}

  // Changes the limit of waiting calls per tenant.
  void SetWaiting(std::uint32_t waiting) {
    MutexLock lock(mutex_);
    waiting_ = waiting;
  }

  // A call may run while it holds a Place.
  class Place {
   public:
    Place(Admission* admission, TenantId tenant) : admission_(admission), tenant_(tenant) {}
    Place(Place&& other) noexcept
        : admission_(std::exchange(other.admission_, nullptr)), tenant_(other.tenant_) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (admission_ != nullptr) admission_->Leave(tenant_);
    }

   private:
    Admission* admission_;
    TenantId tenant_;
  };

  // Waits for a place. RESOURCE_EXHAUSTED if too many calls of the tenant wait already, CANCELLED
  // if `gone` becomes true while waiting.
  absl::StatusOr<Place> Enter(TenantId tenant, const std::function<bool()>& gone) {
    MutexLock lock(mutex_);
    Line& line = lines_[tenant];  // the reference remains valid: std::map
    if (!MayRun(line) && line.waiting >= waiting_) {
      return WithCause(absl::ResourceExhaustedError(
                           Concat(line.running, " ", options_.what, " requests run and ",
                                  line.waiting, " wait, which is the limit; retry later")),
                       ErrorCause::kOverloaded);
    }
    ++line.waiting;
    while (!MayRun(line)) {
      // There is no notification for a caller that goes away, so poll.
      (void)freed_.WaitUntil(mutex_, SystemClock().Now() + std::chrono::milliseconds(50));
      if (!gone()) continue;
      --line.waiting;
      freed_.NotifyAll();  // this call may have consumed a wake-up meant for another
      return absl::CancelledError("the caller has cancelled the call");
    }
    --line.waiting;
    ++line.running;
    ++running_;
    return Place(this, tenant);
  }

 private:
  // The calls of one tenant.
  struct Line {
    std::uint32_t running = 0;
    std::uint32_t waiting = 0;
  };

  bool MayRun(const Line& line) const TESSERA_REQUIRES(mutex_) {
    if (line.running == 0) return true;
    if (running_ >= options_.running) return false;
    return std::all_of(lines_.begin(), lines_.end(), [&line](const auto& entry) {
      return entry.second.waiting == 0 || entry.second.running >= line.running;
    });
  }

  void Leave(TenantId tenant) {
    MutexLock lock(mutex_);
    --lines_[tenant].running;
    --running_;
    freed_.NotifyAll();  // each waiter checks whether it is its turn
  }

  const Options options_;
  Mutex mutex_;
  CondVar freed_;
  std::uint32_t waiting_ TESSERA_GUARDED_BY(mutex_);
  std::uint32_t running_ TESSERA_GUARDED_BY(mutex_) = 0;  // sum over all lines
  std::map<TenantId, Line> lines_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
