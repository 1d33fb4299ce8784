// The leases: every attached session and the stream that keeps it alive. A session ends when its
// stream ends, when its descriptor socket hangs up, or when the daemon says so; whichever comes
// first ends it once, and what it held is given back on a background thread.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/metrics/metrics.h"
#include "daemon/serving/attach/watcher.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// The stream of one session, as others may use it. Thread-safe.
class Lease {
 public:
  virtual ~Lease() = default;
  virtual void Push(v1::AttachResponse message) = 0;
  // Ends the stream with this status, if it has not ended yet.
  virtual void Cut(const absl::Status& why) = 0;
};

class Connections final : public Watcher::Listener {
 public:
  explicit Connections(Services& services) : services_(services) {}
  void set_watcher(Watcher* watcher) { watcher_ = watcher; }

  void Opened(cache::Tenant& tenant, std::shared_ptr<cache::SessionState> session,
              std::shared_ptr<Lease> lease);
  // Idempotent. `cut`: tell the worker why, through its stream.
  void End(SessionId id, metrics::SessionEnd reason, const absl::Status& cut);
  void EndAll(metrics::SessionEnd reason, const absl::Status& cut);
  void Broadcast(const v1::AttachResponse& message);
  std::size_t size() const;
  // Returns when no session is left, or at the deadline. Hurry moves the deadline of this wait, or
  // of one to come, ahead.
  void WaitUntilNone(Clock::TimePoint deadline);
  void Hurry(Clock::TimePoint deadline);

  void WitnessLost(SessionId session) override;
  void PoolShrunk(cache::Tenant& tenant) override;

 private:
  struct Entry {
    cache::Tenant* tenant;
    std::shared_ptr<cache::SessionState> session;
    std::shared_ptr<Lease> lease;
  };
  std::vector<Entry> All() const;

  Services& services_;
  Watcher* watcher_ = nullptr;
  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<SessionId, Entry> entries_ TESSERA_GUARDED_BY(mutex_);
  Clock::TimePoint deadline_ TESSERA_GUARDED_BY(mutex_) = Clock::TimePoint::max();
};

}  // namespace tessera::serving
