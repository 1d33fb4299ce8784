// The order of background work: by priority, then in turns, so that whoever queues much delays
// nobody else. Not thread-safe.
//
// Within a priority tenants take turns of one job each, and within a tenant owners do; the jobs of
// one owner run in the order in which they came. One that goes on comes before all others of its
// tenant, so that no more is begun at a time than there are threads. Who begins to wait joins
// behind all that wait already, and before its turn every other has at most one. Push and Pop take
// O(log n) for n tenants and owners that wait; those that have nothing queued take no memory.
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
#include "daemon/base/ids.h"

namespace tessera {

// Lower runs first.
enum class JobPriority : std::uint8_t { kTails = 0, kSeals = 1, kPressure = 2 };
inline constexpr std::size_t kJobPriorities = 3;

struct JobSpec {
  std::string name;  // what kind of work it is: "absorb-tails", say
  JobPriority priority;
  TenantId tenant{};  // whose work it is; invalid: the daemon's own
  // What of the tenant's it is for: the id of a session or a sequence, which one tenant never gives
  // twice. 0: nothing in particular.
  std::uint64_t owner = 0;
  bool goes_on = false;  // with what a job of the owner has begun: before others of its tenant
};

class FairQueue {
 public:
  using Job = absl::AnyInvocable<void() &&>;
  struct Entry {
    JobSpec spec;
    Job job;
  };

  void Push(JobSpec spec, Job job);
  // Takes the job whose turn it is out of those of priority `last` or before it. Nothing where none
  // of them waits.
  std::optional<Entry> Pop(JobPriority last = JobPriority::kPressure);
  std::size_t size(JobPriority priority) const;

 private:
  // Queues side by side, one per key, that take turns. One that has become empty is gone.
  template <typename Key, typename Queue>
  class Turns {
   public:
    bool empty() const { return ring_.empty(); }
    // The queue of `key`, for a Push that must follow: an empty one has no turn.
    Queue& Of(const Key& key) {
      const auto [place, is_new] = queues_.try_emplace(key);
      if (is_new) place->second.turn = ring_.insert(ring_.end(), key);
      return place->second.queue;
    }
    // The next turn is that of `key`, which waits.
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

  // The jobs of one owner. A list, for it takes only what its jobs take.
  class Fifo {
   public:
    bool empty() const { return entries_.empty(); }
    void Push(Entry entry) {
      entries_.insert(entry.spec.goes_on ? entries_.begin() : entries_.end(), std::move(entry));
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
