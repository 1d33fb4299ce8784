// One thread's wait for descriptors and deadlines: epoll, an eventfd to wake it, no timer of its
// own. Idle, it makes no system call at all.
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

// An eventfd: Signal from any thread or process that holds it; Drain by the one that waits. Drain
// never blocks, whatever another holder does to the event.
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

class EventLoop {
 public:
  struct Ready {
    bool readable = false;
    bool writable = false;
    bool hung_up = false;  // the peer is gone
  };
  using Handler = std::function<void(Ready)>;

  static absl::StatusOr<EventLoop> Create();

  // Called on the loop's thread only. The handler may add and remove watches, its own included.
  absl::Status Watch(int fd, Handler handler);
  void Unwatch(int fd);
  // What a watched descriptor is called for beside its peer's end: data to read, as it is at first,
  // or room to write.
  void AwaitData(int fd);
  void AwaitRoom(int fd);

  // Waits for at most `timeout` (infinite where none), then calls the handlers that are due.
  void RunOnce(std::optional<absl::Duration> timeout);

 private:
  void Await(int fd, std::uint32_t events);
  explicit EventLoop(Fd epoll) : epoll_(std::move(epoll)) {}
  // Events carry a token, not the descriptor: a number closed and reused within one round must not
  // receive its predecessor's event.
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
