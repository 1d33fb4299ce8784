// FairQueue orders background jobs: by priority, then round-robin, so that a tenant with many
// queued jobs does not delay the others. Not thread-safe; ThreadScheduler locks it.
//
// Within a priority, tenants take turns of one job each, and within a tenant, its owners do. The
// jobs of one owner run in the order they were pushed. A continuation (`is_continuation`) runs
// before all other jobs of its tenant, so that at most as many pieces of work are in progress as
// there are threads. A tenant or owner that gets its first job joins at the end of the round.
//
// Push and Pop take O(log n) for n waiting tenants and owners. A tenant or owner without jobs uses
// no memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"

namespace tessera {

// Lower values run first.
enum class JobPriority : std::uint8_t { kTails = 0, kSeals = 1, kPressure = 2 };
inline constexpr std::size_t kJobPriorities = 3;

struct JobSpec {
  std::string name;  // the kind of work, e.g. "absorb-tails"
  JobPriority priority;
  TenantId tenant{};  // the tenant the work is for; invalid: the daemon itself
  // The session or sequence the work is for; such ids are unique within a tenant. 0: none.
  std::uint64_t owner = 0;
  bool is_continuation = false;  // continues work that a job of this owner began
};

class FairQueue {
 public:
  using Job = absl::AnyInvocable<void() &&>;
  struct Entry {
    JobSpec spec;
    Job job;
    Clock::TimePoint submitted{};  // as passed to Push
  };

  void Push(JobSpec spec, Job job, Clock::TimePoint submitted = {});
  // Removes and returns the next job among those of priority `last` or more urgent ones; nullopt if
  // there is none.
  std::optional<Entry> Pop(JobPriority last = JobPriority::kPressure);
  std::size_t size(JobPriority priority) const;

 private:
  // One queue per key, served round-robin. An empty queue is removed.
  template <typename Key, typename Queue>
  class Turns {
   public:
    bool empty() const { return ring_.empty(); }
    // The queue of `key`, created if needed. The caller must push to it: Pop expects a job in it.
    Queue& Of(const Key& key) {
      const auto [place, is_new] = queues_.try_emplace(key);
      if (is_new) place->second.turn = ring_.insert(ring_.end(), key);
      return place->second.queue;
    }
    // Gives the next turn to `key`, which must have a job.
    void Prefer(const Key& key) {
      ring_.splice(ring_.begin(), ring_, queues_.find(key)->second.turn);
    }
    Entry Pop() {
      const auto place = queues_.find(ring_.front());
      Entry entry = place->second.queue.Pop();
      if (place->second.queue.empty()) {
        ring_.pop_front();
        queues_.erase(place);
      } else {
        ring_.splice(ring_.end(), ring_, ring_.begin());
      }
      return entry;
    }

   private:
    struct Waiting {
      Queue queue;
      typename std::list<Key>::iterator turn;
    };
    std::map<Key, Waiting> queues_;
    std::list<Key> ring_;  // the next turn first
  };

  // The jobs of one owner. A list, because it uses memory only for its jobs.
  class Fifo {
   public:
    bool empty() const { return entries_.empty(); }
    void Push(Entry entry) {
      entries_.insert(entry.spec.is_continuation ? entries_.begin() : entries_.end(),
                      std::move(entry));
    }
    Entry Pop() {
      Entry entry = std::move(entries_.front());
      entries_.pop_front();
      return entry;
    }

   private:
    std::list<Entry> entries_;
  };

  using Owners = Turns<std::uint64_t, Fifo>;
  using Tenants = Turns<TenantId, Owners>;

  std::array<Tenants, kJobPriorities> priorities_;
  std::array<std::size_t, kJobPriorities> sizes_{};
};

}  // namespace tessera
