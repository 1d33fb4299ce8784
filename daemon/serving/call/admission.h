// How many long calls run at a time. More wait for a place; where too many wait, the next one is
// refused, so that no worker can take the threads that everybody's short calls need.
//
// Tenants do not wait for each other: one of which nothing runs enters at once, and each has a line
// of its own to wait in. So as many more may run as there are other tenants. What is left of the
// places goes to whom the fewest run of.
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

// Thread-safe. Outlives its places.
class Admission {
 public:
  struct Options {
    std::string_view what;  // for people
    std::uint32_t running;  // of all tenants
    std::uint32_t waiting;  // of each
  };
  explicit Admission(const Options& options) : options_(options) {}

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

  // RESOURCE_EXHAUSTED where too many of the tenant wait, CANCELLED where the caller has gone
  // meanwhile.
  absl::StatusOr<Place> Enter(TenantId tenant, const std::function<bool()>& gone) {
    MutexLock lock(mutex_);
    Line& line = lines_[tenant];  // stays where it is
    if (!MayRun(line) && line.waiting >= options_.waiting) {
      return WithCause(absl::ResourceExhaustedError(Concat(
                           line.running, " ", options_.what, " requests run and ", line.waiting,
                           " wait, the most there may be; retry when some have been answered")),
                       ErrorCause::kOverloaded);
    }
    ++line.waiting;
    while (!MayRun(line)) {
      // Nobody tells of a caller that goes: it is looked for now and then.
      (void)freed_.WaitUntil(mutex_, SystemClock().Now() + std::chrono::milliseconds(50));
      if (!gone()) continue;
      --line.waiting;
      freed_.NotifyAll();  // what this one may have been woken for is another's
      return absl::CancelledError("the caller has gone");
    }
    --line.waiting;
    ++line.running;
    ++running_;
    return Place(this, tenant);
  }

 private:
  // Of one tenant.
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
    freed_.NotifyAll();  // whose turn it is they see themselves
  }

  const Options options_;
  Mutex mutex_;
  CondVar freed_;
  std::uint32_t running_ TESSERA_GUARDED_BY(mutex_) = 0;  // the sum of the lines'
  std::map<TenantId, Line> lines_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
