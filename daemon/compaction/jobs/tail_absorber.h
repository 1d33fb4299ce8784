// The compactor's first duty: moving full tiles from tails into segments, in the background.
//
// A worker that filled a tile while the daemon slept signals its session's wake event; the event
// loop calls Wake, which queues one job per session. A job makes one pass over the session's tails.
// Where it found something it queues itself again, behind the other sessions: a worker that commits
// without end keeps nobody else waiting. Where it did not, it asks for the next wake and looks once
// more: a tile that filled in between is never lost.
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

class TailAbsorber {
 public:
  struct Options {
    Scheduler* scheduler;
    Logger* logger;
    const Clock* clock;
    // How long a job that found nothing keeps looking before it asks for a wake. 0: not at all.
    // Trades a core for system calls in the worker; for measuring, and for latency at any price.
    Clock::Duration linger{};
    // Told of each sequence whose tail has moved into segments; null: nobody.
    Compactor* compactor = nullptr;
  };
  explicit TailAbsorber(const Options& options) : options_(options) {}

  // Thread-safe. Cheap where a job for the session already waits.
  void Wake(const std::shared_ptr<cache::SessionState>& session);

  std::uint64_t jobs_run() const { return jobs_run_.load(std::memory_order_relaxed); }

 private:
  // `idle_since`: since when the passes have found nothing.
  void Queue(const std::shared_ptr<cache::SessionState>& session, Clock::TimePoint idle_since);
  void Run(const std::shared_ptr<cache::SessionState>& session, Clock::TimePoint idle_since);
  std::uint64_t AbsorbAll(cache::SessionState& session);
  void Complain(const cache::Sequence& sequence, SessionId session, const absl::Status& why);

  const Options options_;
  std::atomic<std::uint64_t> jobs_run_{0};
  Mutex mutex_;
  // Sessions that have a job, waiting or running. One that is running leaves before it asks for the
  // next wake, so that a signal after that queues the next job.
  absl::flat_hash_set<SessionId> queued_ TESSERA_GUARDED_BY(mutex_);
  // A worker decides how often a full pool is met: complaints are kept to one a second.
  Seldom complaints_;
};

}  // namespace tessera::compaction
