// How many long calls run at a time. More wait for a place; where too many wait, the next one is
// refused, so that no worker can take the threads that everybody's short calls need.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"

namespace tessera::serving {

// Thread-safe. Outlives its places.
class Admission {
 public:
  struct Options {
    std::string_view what;  // for people
    std::uint32_t running;
    std::uint32_t waiting;
  };
  explicit Admission(const Options& options) : options_(options) {}

  class Place {
   public:
    explicit Place(Admission* admission) : admission_(admission) {}
    Place(Place&& other) noexcept : admission_(std::exchange(other.admission_, nullptr)) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (admission_ != nullptr) admission_->Leave();
    }

   private:
    Admission* admission_;
  };

  // RESOURCE_EXHAUSTED where too many wait, CANCELLED where the caller has gone meanwhile.
  absl::StatusOr<Place> Enter(const std::function<bool()>& gone) {
    MutexLock lock(mutex_);
    if (running_ >= options_.running && waiting_ >= options_.waiting) {
      return absl::ResourceExhaustedError(Concat(running_, " ", options_.what, " requests run and ",
                                                 waiting_,
                                                 " wait, the most there may be; ask again later"));
    }
    ++waiting_;
    while (running_ >= options_.running) {
      // Nobody tells of a caller that goes: it is looked for now and then.
      (void)freed_.WaitUntil(mutex_, SystemClock().Now() + std::chrono::milliseconds(50));
      if (!gone()) continue;
      --waiting_;
      freed_.NotifyOne();  // what this one may have been woken for is the next one's
      return absl::CancelledError("the caller has gone");
    }
    --waiting_;
    ++running_;
    return Place(this);
  }

 private:
  void Leave() {
    MutexLock lock(mutex_);
    --running_;
    freed_.NotifyOne();
  }

  const Options options_;
  Mutex mutex_;
  CondVar freed_;
  std::uint32_t running_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint32_t waiting_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::serving
