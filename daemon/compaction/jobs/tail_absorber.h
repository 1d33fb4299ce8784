// Moves full tiles from tail rings into segments, in the background.
//
// A worker that fills a tile signals its session's wake event, if the daemon asked for it. The
// event loop calls Wake, which queues one job per session. A job makes one pass over the session's
// tails. If it found tiles, it queues itself again after the other sessions' jobs, so that one busy
// worker cannot delay the others. If it found none, it asks for the next wake and looks once more,
// so that a tile filled in between is not missed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/base/rate_limit.h"
#include "daemon/base/scheduler.h"
#include "daemon/cache/tenant/session_state.h"
#include "daemon/compaction/jobs/compactor.h"

namespace tessera::compaction {

// Owned by the daemon. Failures are logged at a limited rate and retried with the next tile.
class TailAbsorber {
 public:
  struct Options {
    Scheduler* scheduler;
    Logger* logger;
    const Clock* clock;
    // How long a job polls after it found nothing, before it asks for a wake. 0: no polling.
    // Polling occupies a core and saves the worker system calls.
    Clock::Duration linger{};
    // Notified of each sequence whose tail moved into segments; may be null.
    Compactor* compactor = nullptr;
  };
  explicit TailAbsorber(const Options& options) : options_(options) {}

  // Thread-safe. Cheap if the session already has a job.
  void Wake(const std::shared_ptr<cache::SessionState>& session);

  std::uint64_t jobs_run() const { return jobs_run_.load(std::memory_order_relaxed); }

 private:
  // `idle_since`: time of the last pass that found tiles.
  void Queue(const std::shared_ptr<cache::SessionState>& session, Clock::TimePoint idle_since);
  void Run(const std::shared_ptr<cache::SessionState>& session, Clock::TimePoint idle_since);
  std::uint64_t AbsorbAll(cache::SessionState& session);
  void Complain(const cache::Sequence& sequence, SessionId session, const absl::Status& why);

  const Options options_;
  std::atomic<std::uint64_t> jobs_run_{0};
  Mutex mutex_;
  // Sessions with a queued or running job. A running job removes its session before it asks for the
  // next wake, so that a signal after that queues a new job.
  absl::flat_hash_set<SessionId> queued_ TESSERA_GUARDED_BY(mutex_);
  // Workers control how often a full pool is hit, so the log is limited to one line per second.
  LogRateLimit complaints_;
};

}  // namespace tessera::compaction
