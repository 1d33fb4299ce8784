#include "daemon/platform/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera {

absl::StatusOr<Event> Event::Create() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus("eventfd");
  return Event(std::move(fd));
}

void SignalEvent(int event_fd) {
  const std::uint64_t one = 1;
  // A full counter (EAGAIN) already wakes the reader, so the result does not matter.
  [[maybe_unused]] const ssize_t n = ::write(event_fd, &one, sizeof one);
}

void Event::Signal() const { SignalEvent(fd_.get()); }

void Event::Drain() const {
  std::uint64_t count;
  iovec io{&count, sizeof count};
  // Other holders share the file flags and may have cleared O_NONBLOCK, so the call itself must ask
  // not to wait.
  [[maybe_unused]] const ssize_t n = ::preadv2(fd_.get(), &io, 1, -1, RWF_NOWAIT);
}

absl::StatusOr<EventLoop> EventLoop::Create() {
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus("epoll_create1");
  return EventLoop(std::move(epoll));
}

absl::Status EventLoop::Watch(int fd, Handler handler) {
  const std::uint64_t token = next_token_++;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(Concat("watching fd ", fd));
  }
  tokens_[fd] = token;
  watched_[token] = std::make_shared<Watched>(Watched{fd, std::move(handler)});
  return absl::OkStatus();
}

void EventLoop::Unwatch(int fd) {
  const auto it = tokens_.find(fd);
  if (it == tokens_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watched_.erase(it->second);
  tokens_.erase(it);
}

void EventLoop::AwaitData(int fd) { Await(fd, EPOLLIN | EPOLLRDHUP); }
void EventLoop::AwaitRoom(int fd) { Await(fd, EPOLLOUT | EPOLLRDHUP); }
void EventLoop::AwaitRoomOnly(int fd) { Await(fd, EPOLLOUT); }
void EventLoop::AwaitHangUp(int fd) { Await(fd, EPOLLRDHUP); }

void EventLoop::Await(int fd, std::uint32_t events) {
  const auto it = tokens_.find(fd);
  if (it == tokens_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = it->second;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::RunOnce(std::optional<absl::Duration> timeout) {
  int wait_ms = -1;
  if (timeout.has_value()) {
    const std::int64_t ms = absl::ToInt64Milliseconds(absl::Ceil(*timeout, absl::Milliseconds(1)));
    wait_ms = static_cast<int>(std::clamp<std::int64_t>(ms, 0, 3'600'000));
  }
  epoll_event events[64];
  const int n = ::epoll_wait(epoll_.get(), events, 64, wait_ms);
  for (int i = 0; i < n; ++i) {
    const auto it = watched_.find(events[i].data.u64);
    if (it == watched_.end()) continue;  // unwatched by an earlier handler of this round
    const std::shared_ptr<Watched> watched = it->second;
    watched->handler({.readable = (events[i].events & EPOLLIN) != 0,
                      .writable = (events[i].events & EPOLLOUT) != 0,
                      .hung_up = (events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0});
  }
}

}  // namespace tessera
