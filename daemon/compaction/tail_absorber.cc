#include "daemon/compaction/tail_absorber.h"

#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"

namespace tessera::compaction {

void TailAbsorber::Wake(std::shared_ptr<cache::SessionState> session) {
  {
    MutexLock lock(mutex_);
    if (!queued_.insert(session->id()).second) return;
  }
  // Weak: work for a session that ends while it waits is dropped with it.
  options_.scheduler->Submit(
      "absorb-tails", JobPriority::kTails,
      [this, id = session->id(), weak = std::weak_ptr<cache::SessionState>(session)]() {
        {
          MutexLock lock(mutex_);
          queued_.erase(id);
        }
        if (const std::shared_ptr<cache::SessionState> held = weak.lock()) Run(*held);
      });
}

void TailAbsorber::Run(cache::SessionState& session) {
  jobs_run_.fetch_add(1, std::memory_order_relaxed);
  session.control()->CancelWake();
  Clock::TimePoint idle_since = options_.clock->Now();
  for (;;) {
    if (AbsorbAll(session) > 0) {
      idle_since = options_.clock->Now();
      continue;
    }
    if (options_.clock->Now() - idle_since >= options_.linger) break;
    std::this_thread::yield();
  }
  session.control()->AskForWake();
  // A worker that filled a tile before it could see the wish did not signal: look once more.
  AbsorbAll(session);
}

std::uint64_t TailAbsorber::AbsorbAll(cache::SessionState& session) {
  std::uint64_t tokens = 0;
  for (const std::shared_ptr<cache::Sequence>& sequence : session.Decoding()) {
    absl::StatusOr<std::uint64_t> absorbed = sequence->AbsorbFullTiles();
    if (absorbed.ok()) {
      tokens += *absorbed;
      continue;
    }
    // A failed sequence tells its worker through its block; a full pool leaves the tail as it is,
    // and the worker that waits for ring space signals again.
    options_.logger->Log(LogLevel::kWarning, "tail not absorbed",
                         {{"sequence", sequence->id().value()},
                          {"session", session.id().value()},
                          {"error", AsStringView(absorbed.status().message())}});
  }
  return tokens;
}

}  // namespace tessera::compaction
