// `EventPublisher` tells subscribers over ZeroMQ what workers find here, as vLLM's engines do.
//
//   PUB      [topic, number, payload]           topic: kv@WORKER@MODEL
//   ROUTER   asked [first number, topic]        answers [number, payload]... and [-1, ""]
//            the topic may be left out where there is only one
//
// Numbers are 8 bytes, big endian, and start at 0 for each topic; batch 0 begins with
// AllBlocksCleared. Who misses a number asks for a replay. If that batch is gone, the topic is told
// anew: AllBlocksCleared, then all that is there.
//
// Neither thread ever waits for a subscriber.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cluster/events/event_encoder.h"
#include "daemon/cluster/events/event_history.h"
#include "daemon/cluster/events/event_queue.h"
#include "daemon/metrics/collector.h"

namespace tessera::cluster {

class EventPublisher final : public metrics::Collector {
 public:
  struct Options {
    std::string address;         // "127.0.0.1:5557"
    std::string replay_address;  // empty: no replays
    config::EventEncoding encoding = config::EventEncoding::kMap;
    std::string medium;  // "CPU" or "GPU": where the blocks are
    EventQueue* queue = nullptr;
    // Has the reader told anew: PrefixStore::Retell.
    std::function<void(const cache::BlockReader&)> retell;
    std::size_t history_bytes = EventHistory::kMostBytes;
  };
  // UNAVAILABLE names an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<EventPublisher>> Create(const Options& options);
  ~EventPublisher();

  // The address that subscribers use, and that of replays ("": none), with the port that was taken
  // for port 0.
  const std::string& address() const { return address_; }
  const std::string& replay_address() const { return replay_address_; }

  void Collect(metrics::Visitor& visitor) const override;

 private:
  struct CloseSocket {
    void operator()(void* socket) const;
  };
  struct EndContext {
    void operator()(void* context) const;
  };
  using Socket = std::unique_ptr<void, CloseSocket>;
  // Not sent yet.
  using Pending = std::map<std::string, EventBatch>;  // by topic

  explicit EventPublisher(const Options& options)
      : options_(options), history_(options.history_bytes) {}
  absl::StatusOr<Socket> Bind(int type, const std::string& address, std::string& bound);

  void Publish();
  void Apply(std::vector<EventQueue::Note> notes);
  void Send(Pending& pending);
  void SendBatch(const std::string& topic, const EventBatch& batch);
  void ServeReplays();
  void Replay(const std::vector<std::string>& request);

  const Options options_;
  EventHistory history_;
  std::unique_ptr<void, EndContext> context_;
  Socket events_;
  Socket replays_;
  std::string address_;
  std::string replay_address_;
  std::map<std::string, std::vector<std::string>> topics_;  // by worker; of the publishing thread
  std::map<std::string, Clock::TimePoint> retold_;  // workers, for askers; of the replaying thread
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> stored_{0};
  std::atomic<std::uint64_t> removed_{0};
  std::atomic<std::uint64_t> cleared_{0};
  std::atomic<std::uint64_t> replayed_{0};
  std::thread publishing_;
  std::thread replaying_;
};

}  // namespace tessera::cluster
