// Seals and choices that found no memory, and those that came while others waited for some: a line
// for each tenant. One of a line is tried at a time, after a while that doubles; when it finds
// memory, the next one follows at once. So a full pool costs an attempt now and then, and nothing
// is forgotten.
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
#include "daemon/cache/sequence.h"

namespace tessera::compaction {

// Thread-safe.
class StalledWork {
 public:
  enum class Kind : std::uint8_t { kSeal, kChoice };
  struct Item {
    TenantId tenant;
    std::weak_ptr<cache::Sequence> sequence;
    Kind kind = Kind::kSeal;
    std::uint32_t first = 0;  // lane; of a choice the layer
    std::uint32_t count = 1;  // layers that share it
  };
  static constexpr Clock::Duration kFirstPause = std::chrono::milliseconds(100);
  static constexpr Clock::Duration kLongestPause = std::chrono::seconds(5);

  // To the end of its tenant's line. True where it had none, or the one that was being tried has
  // come back: somebody must look at DueIn.
  bool Add(Item item, Clock::TimePoint now);
  // Whether there is a line, or one of it is being tried.
  bool Any(TenantId tenant) const;
  // The first of each line whose time has come. Each is answered by Add or Found.
  std::vector<Item> TakeDue(Clock::TimePoint now);
  // One that was taken needs nothing any more: the next one, which is answered likewise.
  std::optional<Item> Found(TenantId tenant);
  // How long until there is one to be taken; nothing: until the next Add.
  std::optional<Clock::Duration> DueIn(Clock::TimePoint now) const;

 private:
  struct Line {
    std::deque<Item> items;
    bool tried = false;  // one was taken and has not been answered
    Clock::Duration pause = kFirstPause;
    Clock::TimePoint due;
  };

  mutable Mutex mutex_;
  std::map<TenantId, Line> lines_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::compaction
