// Seals that found no memory, and those that came while others waited for some: a line for each
// tenant. One of a line is tried at a time, after a while that doubles; when it has been carried
// out, the next one follows at once. So a full pool costs an attempt now and then, and nothing is
// forgotten.
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

// Thread-safe. What ends the segment is kept with the lane (SealWishes).
class StalledSeals {
 public:
  struct Item {
    TenantId tenant;
    std::weak_ptr<cache::Sequence> sequence;
    std::uint32_t lane = 0;
  };
  static constexpr Clock::Duration kFirstPause = std::chrono::milliseconds(100);
  static constexpr Clock::Duration kLongestPause = std::chrono::seconds(5);

  // To the end of its tenant's line. True where there was none: somebody must look at DueIn.
  bool Join(Item item, Clock::TimePoint now);
  // One that was taken has found no memory again: behind the others. Somebody must look at DueIn.
  void Return(Item item, Clock::TimePoint now);
  // One that was taken is done with: the next one, which is answered by either, too. `found`: there
  // was memory for it.
  std::optional<Item> Next(TenantId tenant, bool found);

  // Whether there is a line, or one of it is being tried.
  bool Any(TenantId tenant) const;
  // The first of each line whose time has come.
  std::vector<Item> TakeDue(Clock::TimePoint now);
  // How long until there is one to be taken; nothing: until one joins or returns.
  std::optional<Clock::Duration> DueIn(Clock::TimePoint now) const;

 private:
  struct Line {
    std::deque<Item> items;
    bool tried = false;  // one was taken and has not been answered; else `items` is not empty
    Clock::Duration pause = kFirstPause;
    Clock::TimePoint due;
  };

  mutable Mutex mutex_;
  std::map<TenantId, Line> lines_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
