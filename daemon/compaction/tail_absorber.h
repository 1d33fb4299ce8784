// The compactor's first duty: moving full tiles from tails into segments, in the background.
//
// A worker that filled a tile while the daemon slept signals its session's wake event; the event
// loop calls Wake, which queues one job per session. The job absorbs until there is nothing left,
// asks for the next wake, and looks once more: a tile that filled in between is never lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_set.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/base/scheduler.h"
#include "daemon/cache/session_state.h"

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
  };
  explicit TailAbsorber(const Options& options) : options_(options) {}

  // Thread-safe. Cheap where a job for the session already waits.
  void Wake(std::shared_ptr<cache::SessionState> session);

  std::uint64_t jobs_run() const { return jobs_run_.load(std::memory_order_relaxed); }

 private:
  void Run(cache::SessionState& session);
  std::uint64_t AbsorbAll(cache::SessionState& session);

  const Options options_;
  std::atomic<std::uint64_t> jobs_run_{0};
  Mutex mutex_;
  absl::flat_hash_set<SessionId> queued_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
