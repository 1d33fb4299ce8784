// EventLoop waits for file descriptors on one thread (epoll); Event wakes it from other threads. An
// idle loop makes no system calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/fd.h"

namespace tessera {

// An eventfd. Any thread or process that holds it may Signal; the waiting thread Drains. Drain
// never blocks, even if another holder has cleared O_NONBLOCK.
class Event {
 public:
  static absl::StatusOr<Event> Create();
  void Signal() const;
  void Drain() const;
  int fd() const { return fd_.get(); }

 private:
  explicit Event(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};
void SignalEvent(int event_fd);

// Used by one thread. Handlers run inside RunOnce.
class EventLoop {
 public:
  struct Ready {
    bool readable = false;
    bool writable = false;
    bool hung_up = false;  // the peer is gone
  };
  using Handler = std::function<void(Ready)>;

  static absl::StatusOr<EventLoop> Create();

  // Watches `fd` for data. The handler may add and remove watches, including its own.
  absl::Status Watch(int fd, Handler handler);
  void Unwatch(int fd);
  // Change what a watched descriptor waits for: data to read (the initial state) or room to write.
  // A peer that hangs up is always reported. AwaitRoomOnly does not report one that only stops
  // sending: it would be reported again and again.
  void AwaitData(int fd);
  void AwaitRoom(int fd);
  void AwaitRoomOnly(int fd);
  void AwaitHangUp(int fd);  // neither data nor room

  // Waits for at most `timeout` (nullopt: forever), then calls the handlers of ready descriptors.
  void RunOnce(std::optional<absl::Duration> timeout);

 private:
  void Await(int fd, std::uint32_t events);
  explicit EventLoop(Fd epoll) : epoll_(std::move(epoll)) {}
  // Events carry a token instead of the descriptor: a descriptor number that is closed and reused
  // within one round must not receive its predecessor's event.
  struct Watched {
    int fd;
    Handler handler;
  };
  Fd epoll_;
  std::uint64_t next_token_ = 1;
  std::unordered_map<std::uint64_t, std::shared_ptr<Watched>> watched_;
  std::unordered_map<int, std::uint64_t> tokens_;
};

}  // namespace tessera
