// `EventHistory` numbers the batches of each topic and keeps the newest ones, so that a subscriber
// who has missed some can ask for them.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/mutex.h"

namespace tessera::cluster {

// Thread-safe: the publisher adds while replays read.
class EventHistory {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20;

  explicit EventHistory(std::size_t most_bytes = kMostBytes) : most_bytes_(most_bytes) {}

  using Payload = std::shared_ptr<const std::string>;
  // The number of the batch, from 0 on for each topic. Forgets the oldest batches of all topics
  // beyond the limit, but never this one.
  std::uint64_t Add(const std::string& topic, Payload payload);
  void Forget(const std::string& topic);
  bool Has(const std::string& topic) const;
  // The only topic; nullopt: there are none, or several.
  std::optional<std::string> OnlyTopic() const;

  struct Replay {
    std::uint64_t first = 0;  // number of payloads[0]: more than was asked for if those are gone
    std::vector<Payload> payloads;
  };
  // The batches from `first` on. Empty for a topic that does not exist.
  Replay From(const std::string& topic, std::uint64_t first) const;

 private:
  struct Topic {
    std::uint64_t next = 0;
    std::deque<Payload> kept;  // ends before `next`
  };

  const std::size_t most_bytes_;
  mutable Mutex mutex_;
  std::map<std::string, Topic> topics_ TESSERA_GUARDED_BY(mutex_);
  // Topics of the kept batches, oldest batch first.
  std::list<std::string> order_ TESSERA_GUARDED_BY(mutex_);
  std::size_t bytes_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::cluster
