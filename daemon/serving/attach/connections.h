// Connections holds the lease of every attached session. A session ends when its stream ends, when
// its descriptor socket closes, or when the daemon ends it, whichever is first. It ends once, and a
// background job frees what it held.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/base/rate_limit.h"
#include "daemon/metrics/metrics.h"
#include "daemon/serving/attach/watcher.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// The stream of one session. Thread-safe.
class Lease {
 public:
  virtual ~Lease() = default;
  virtual void Push(v1::AttachResponse message) = 0;
  // Ends the stream with this status, unless it has already ended.
  virtual void Cut(const absl::Status& why) = 0;
};

// Owned by the Server. Thread-safe.
class Connections final : public Watcher::Listener {
 public:
  explicit Connections(Services& services) : services_(services) {}
  void set_watcher(Watcher* watcher) { watcher_ = watcher; }

  void Opened(cache::Tenant& tenant, std::shared_ptr<cache::SessionState> session,
              std::shared_ptr<Lease> lease);
  // Ends a session. `cut` is the status that the worker receives on its stream. Idempotent.
  void End(SessionId id, metrics::SessionEnd reason, const absl::Status& cut);
  void EndAll(metrics::SessionEnd reason, const absl::Status& cut);
  void Broadcast(const v1::AttachResponse& message);
  std::size_t size() const;
  // Waits until the background jobs of all ended sessions are done, or until the deadline. Returns
  // how many are left.
  std::size_t WaitUntilFreed(Clock::TimePoint deadline);
  // Waits until there is no session, or until the deadline. ShortenDrain moves the deadline of a
  // current or later wait forward, never back.
  void WaitUntilNone(Clock::TimePoint deadline);
  void ShortenDrain(Clock::TimePoint deadline);

  void DescriptorSocketClosed(SessionId session) override;
  void PoolExtentsRemoved(cache::Tenant& tenant) override;

 private:
  struct Entry {
    cache::Tenant* tenant;
    std::shared_ptr<cache::SessionState> session;
    std::shared_ptr<Lease> lease;
  };
  std::vector<Entry> All() const;
  // Frees what the session held, and logs its end.
  void Free(SessionId id, metrics::SessionEnd reason, Entry entry);

  // Logs a line about a session, unless there are too many.
  void LogSession(std::string_view event, std::initializer_list<LogField> fields);

  Services& services_;
  LogRateLimit lines_{std::chrono::milliseconds(10), /*burst=*/100};
  Watcher* watcher_ = nullptr;
  mutable Mutex mutex_;
  CondVar ended_;
  std::unordered_map<SessionId, Entry> entries_ TESSERA_GUARDED_BY(mutex_);
  std::size_t freeing_ TESSERA_GUARDED_BY(mutex_) = 0;  // ended, but their job is not done
  Clock::TimePoint deadline_ TESSERA_GUARDED_BY(mutex_) = Clock::TimePoint::max();
};

}  // namespace tessera::serving
