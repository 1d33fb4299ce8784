#include "daemon/compaction/jobs/tail_absorber.h"

#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"

namespace tessera::compaction {

void TailAbsorber::Wake(const std::shared_ptr<cache::SessionState>& session) {
  {
    MutexLock lock(mutex_);
    if (!queued_.insert(session->id()).second) return;
  }
  Queue(session, options_.clock->Now());
}

void TailAbsorber::Queue(const std::shared_ptr<cache::SessionState>& session,
                         Clock::TimePoint idle_since) {
  // Weak: the job is dropped if the session ends while it is queued.
  options_.scheduler->Submit(
      {.name = "absorb-tails",
       .priority = JobPriority::kTails,
       .tenant = session->tenant_id(),
       .owner = session->id().value()},
      [this, id = session->id(), weak = std::weak_ptr<cache::SessionState>(session), idle_since]() {
        if (const std::shared_ptr<cache::SessionState> held = weak.lock()) {
          Run(held, idle_since);
        } else {
          MutexLock lock(mutex_);
          queued_.erase(id);
        }
      });
}

void TailAbsorber::Run(const std::shared_ptr<cache::SessionState>& session,
                       Clock::TimePoint idle_since) {
  jobs_run_.fetch_add(1, std::memory_order_relaxed);
  session->control()->CancelWake();
  const bool progress = AbsorbAll(*session) > 0;
  const Clock::TimePoint now = options_.clock->Now();
  if (progress || now - idle_since < options_.linger) {
    if (!progress) std::this_thread::yield();
    Queue(session, progress ? now : idle_since);
    return;
  }
  {
    MutexLock lock(mutex_);
    queued_.erase(session->id());
  }
  session->control()->RequestWake();
  // A worker that filled a tile before it saw the request did not signal: look once more.
  AbsorbAll(*session);
}

std::uint64_t TailAbsorber::AbsorbAll(cache::SessionState& session) {
  std::uint64_t tokens = 0;
  for (const std::shared_ptr<cache::Sequence>& sequence : session.Decoding()) {
    absl::StatusOr<std::uint64_t> absorbed = sequence->AbsorbFullTiles();
    if (absorbed.ok()) {
      tokens += *absorbed;
      if (*absorbed > 0 && options_.compactor != nullptr) options_.compactor->TailsMoved(sequence);
    } else {
      Complain(*sequence, session.id(), absorbed.status());
    }
  }
  return tokens;
}

// A failed sequence tells its worker through its control block. If the pool is full, the tail is
// unchanged, and the worker signals again when it waits for ring space.
void TailAbsorber::Complain(const cache::Sequence& sequence, SessionId session,
                            const absl::Status& why) {
  const std::optional<std::uint64_t> unsaid = complaints_.Say(options_.clock->Now());
  if (!unsaid.has_value()) return;
  options_.logger->Log(LogLevel::kWarning, "tail not absorbed",
                       {{"sequence", sequence.id().value()},
                        {"session", session.value()},
                        {"error", AsStringView(why.message())},
                        {"like_this_before", *unsaid}});
}

}  // namespace tessera::compaction
