// Queues seals that could not be carried out for lack of memory, one queue per tenant.
//
// One seal of a queue is retried at a time, with exponential backoff. After a success the next one
// is retried at once. So a full pool costs one attempt per backoff period, and no seal is lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::compaction {

// Thread-safe. What the seal has to do is stored with the lane (SealRequests).
class DeferredSeals {
 public:
  struct Item {
    TenantId tenant;
    std::weak_ptr<cache::Sequence> sequence;
    std::uint32_t lane = 0;
  };
  static constexpr Clock::Duration kFirstPause = std::chrono::milliseconds(100);
  static constexpr Clock::Duration kLongestPause = std::chrono::seconds(5);

  // Appends to the tenant's queue. True if it is a new queue: the caller must consult DueIn.
  bool Join(Item item, Clock::TimePoint now);
  // Puts a taken seal back at the end of its queue: there was no memory again. The caller must
  // consult DueIn.
  void Return(Item item, Clock::TimePoint now);
  // Ends a taken seal and takes the next one, which must again be ended by Return or Next.
  // `found`: there was memory for the ended one.
  std::optional<Item> Next(TenantId tenant, bool found);

  // Whether the tenant has queued seals, or one that is being retried.
  bool Any(TenantId tenant) const;
  // Takes the first seal of each queue that is due.
  std::vector<Item> TakeDue(Clock::TimePoint now);
  // Time until the next seal is due; nullopt: not before the next Join or Return.
  std::optional<Clock::Duration> DueIn(Clock::TimePoint now) const;

 private:
  struct Line {
    std::deque<Item> items;
    bool tried = false;  // one is taken; `items` may only be empty then
    Clock::Duration pause = kFirstPause;
    Clock::TimePoint due;
  };

  mutable Mutex mutex_;
  std::map<TenantId, Line> lines_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
