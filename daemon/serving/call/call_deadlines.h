// CallDeadlines gives up calls whose peer keeps them waiting: one that does not take its answer, or
// opens a stream and does not say Hello. What they hold belongs to somebody who goes on.
#pragma once

#include <grpcpp/server_context.h>

#include <cstddef>
#include <unordered_map>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe.
class CallDeadlines {
 public:
  explicit CallDeadlines(Clock::Duration patience) : patience_(patience) {}

  // The peer has `patience` from now on.
  void Add(grpc::CallbackServerContext& context, Clock::TimePoint now) {
    MutexLock lock(mutex_);
    since_.emplace(&context, now);
  }
  // The peer has gone on, or the call is done. Call it before the context goes. Idempotent.
  void Remove(grpc::CallbackServerContext& context) {
    MutexLock lock(mutex_);
    since_.erase(&context);
  }
  // Cancels calls that have waited too long.
  void GiveUp(Clock::TimePoint now) {
    MutexLock lock(mutex_);
    for (const auto& [context, since] : since_) {
      if (now - since > patience_) context->TryCancel();
    }
  }
  bool empty() const {
    MutexLock lock(mutex_);
    return since_.empty();
  }

 private:
  const Clock::Duration patience_;
  mutable Mutex mutex_;
  std::unordered_map<grpc::CallbackServerContext*, Clock::TimePoint> since_
      TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
