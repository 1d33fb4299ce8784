// ReadingTurns lets one connection of a tenant after the other finish its messages. When a tenant
// sends more at once than it may have in memory, all of it arrives, one connection at a time.
#pragma once

#include <chrono>
#include <map>

#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe.
class ReadingTurns {
 public:
  // The turn passes on if its connection reads nothing for so long.
  static constexpr std::chrono::seconds kPatience{5};

  // Whether `who`, a connection with unfinished messages, may read on. `plenty`: the tenant has
  // room, so that all of its connections may.
  bool MayRead(TenantId tenant, const void* who, bool plenty, Clock::TimePoint now) {
    MutexLock lock(mutex_);
    if (plenty) {
      turns_.erase(tenant);
      return true;
    }
    Turn& turn = turns_.try_emplace(tenant, Turn{who, now}).first->second;
    if (turn.whose != who && now - turn.read_last < kPatience) return false;
    turn = {who, now};
    return true;
  }

  // `who` has no unfinished messages any more.
  void Finished(TenantId tenant, const void* who) {
    MutexLock lock(mutex_);
    const auto turn = turns_.find(tenant);
    if (turn != turns_.end() && turn->second.whose == who) turns_.erase(turn);
  }

 private:
  struct Turn {
    const void* whose;  // only compared
    Clock::TimePoint read_last;
  };
  Mutex mutex_;
  std::map<TenantId, Turn> turns_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
