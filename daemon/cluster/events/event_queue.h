// `EventQueue` takes notes of what workers find among prefixes, until the publisher reads them.
//
// It is bounded: what does not fit is lost, and from then on everything of that worker, until the
// publisher has it told anew. So a subscriber never sees a part of the truth as the whole.
//
// A name belongs to the tenant whose worker used it first, as long as one of them is attached.
// Others cannot say anything under it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/prefix/block_events.h"

namespace tessera::cluster {

class EventQueue final : public cache::BlockEventSink {
 public:
  static constexpr std::size_t kMostBlocks = 262'144;  // 38 MiB

  struct Note {
    enum class Kind : std::uint8_t { kChanged, kCleared, kLeft } kind;
    std::string worker;
    std::string model;                      // only of kChanged
    std::vector<cache::BlockEvent> events;  // likewise
  };

  explicit EventQueue(std::size_t most_blocks = kMostBlocks) : most_blocks_(most_blocks) {}

  void Changed(const cache::BlockReader& reader, const std::string& model,
               const std::vector<cache::BlockEvent>& events) override;
  void Cleared(const cache::BlockReader& reader) override;
  void Left(const cache::BlockReader& reader) override;

  // All notes, oldest first. Waits for one, but no longer than `patience`.
  std::vector<Note> Take(Clock::Duration patience);
  // A worker whose notes were lost. The next notes of it are taken whatever their number, so that
  // it can be told anew: once nothing else waits.
  std::optional<cache::BlockReader> TakeLost();
  // Has the worker told anew, as if its notes were lost. False if there is no such worker.
  bool Lose(const std::string& worker);
  // Take returns at once, now and later.
  void Stop();

  struct Figures {
    std::uint64_t waiting_blocks = 0;
    std::uint64_t dropped_blocks = 0;  // since start
  };
  Figures figures() const;

 private:
  bool IsOwner(const cache::BlockReader& reader) const TESSERA_REQUIRES(mutex_);

  const std::size_t most_blocks_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Note> notes_ TESSERA_GUARDED_BY(mutex_);
  std::size_t blocks_ TESSERA_GUARDED_BY(mutex_) = 0;  // in notes_
  std::uint64_t dropped_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::string> owners_ TESSERA_GUARDED_BY(mutex_);  // tenants, by worker
  std::set<std::string> lost_ TESSERA_GUARDED_BY(mutex_);                 // workers
  std::string retold_ TESSERA_GUARDED_BY(mutex_);  // the worker that TakeLost returned last
  bool stopped_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::cluster
