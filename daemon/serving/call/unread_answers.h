// UnreadAnswers holds the calls whose answers are on their way, and gives up those that the peer
// does not take: their memory and their places are somebody's who reads.
#pragma once

#include <grpcpp/server_context.h>

#include <chrono>
#include <cstddef>
#include <unordered_map>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe.
class UnreadAnswers {
 public:
  static constexpr std::chrono::seconds kPatience{30};

  void Add(grpc::CallbackServerContext& context, Clock::TimePoint now) {
    MutexLock lock(mutex_);
    since_.emplace(&context, now);
  }
  // Call it when the call is done, before its context goes.
  void Remove(grpc::CallbackServerContext& context) {
    MutexLock lock(mutex_);
    since_.erase(&context);
  }
  // Cancels those that have waited too long. Returns how many.
  std::size_t GiveUp(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    std::size_t count = 0;
    for (auto& [context, since] : since_) {
      if (now - since < kPatience) continue;
      context->TryCancel();
      ++count;
    }
    return count;
  }

 private:
  Mutex mutex_;
  std::unordered_map<grpc::CallbackServerContext*, Clock::TimePoint> since_
      TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
