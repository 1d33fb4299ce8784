#include "daemon/platform/event_loop.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr absl::Duration kNow = absl::ZeroDuration();

EventLoop MustLoop() {
  absl::StatusOr<EventLoop> loop = EventLoop::Create();
  EXPECT_TRUE(loop.ok()) << loop.status();
  return *std::move(loop);
}

Event MustEvent() {
  absl::StatusOr<Event> event = Event::Create();
  EXPECT_TRUE(event.ok()) << event.status();
  return *std::move(event);
}

std::pair<Fd, Fd> SocketPair() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

// Counts the calls of a handler, and keeps what the last one was told.
void WatchCalls(EventLoop& loop, const Fd& fd, int& calls, EventLoop::Ready& got) {
  const absl::Status watched = loop.Watch(fd.get(), [&calls, &got](EventLoop::Ready ready) {
    ++calls;
    got = ready;
  });
  ASSERT_TRUE(watched.ok()) << watched;
}

TEST(EventLoop, CallsWhoeverIsReady) {
  EventLoop loop = MustLoop();
  Event first = MustEvent();
  Event second = MustEvent();
  int firsts = 0, seconds = 0;
  ASSERT_TRUE(loop.Watch(first.fd(),
                         [&](EventLoop::Ready) {
                           ++firsts;
                           first.Drain();
                         })
                  .ok());
  ASSERT_TRUE(loop.Watch(second.fd(),
                         [&](EventLoop::Ready) {
                           ++seconds;
                           second.Drain();
                         })
                  .ok());
  loop.RunOnce(kNow);
  EXPECT_EQ(firsts + seconds, 0);
  first.Signal();
  first.Signal();
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(firsts, 1);
  second.Signal();
  loop.RunOnce(std::nullopt);
  loop.RunOnce(kNow);
  EXPECT_EQ(firsts, 1);
  EXPECT_EQ(seconds, 1);
}

TEST(EventLoop, AHungUpPeerIsToldApartFromData) {
  EventLoop loop = MustLoop();
  auto [ours, theirs] = SocketPair();
  EventLoop::Ready got;
  ASSERT_TRUE(loop.Watch(ours.get(), [&](EventLoop::Ready ready) { got = ready; }).ok());
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  loop.RunOnce(std::nullopt);
  EXPECT_TRUE(got.readable);
  EXPECT_FALSE(got.hung_up);
  theirs.Close();
  loop.RunOnce(std::nullopt);
  EXPECT_TRUE(got.hung_up);
}

TEST(EventLoop, AwaitsRoomInsteadOfData) {
  EventLoop loop = MustLoop();
  auto [ours, theirs] = SocketPair();
  int calls = 0;
  EventLoop::Ready got;
  WatchCalls(loop, ours, calls, got);
  const std::vector<char> some(4096, 'x');
  ssize_t unread = 0;
  for (ssize_t n; (n = ::send(ours.get(), some.data(), some.size(), MSG_DONTWAIT)) > 0;) {
    unread += n;
  }
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  loop.AwaitRoom(ours.get());
  loop.RunOnce(kNow);
  EXPECT_EQ(calls, 0);
  std::vector<char> all(static_cast<std::size_t>(unread));
  ASSERT_EQ(::recv(theirs.get(), all.data(), all.size(), MSG_WAITALL), unread);
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(got.writable);
  loop.AwaitData(ours.get());
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(got.readable);
  EXPECT_FALSE(got.writable);
}

TEST(EventLoop, AwaitsNothingButTheEndOfAPeer) {
  EventLoop loop = MustLoop();
  auto [ours, theirs] = SocketPair();
  int calls = 0;
  EventLoop::Ready got;
  WatchCalls(loop, ours, calls, got);
  loop.AwaitHangUp(ours.get());
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  loop.RunOnce(kNow);
  EXPECT_EQ(calls, 0);
  theirs.Close();
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(got.hung_up);
}

TEST(EventLoop, ANumberReusedWithinARoundGetsNoEventOfItsPredecessor) {
  EventLoop loop = MustLoop();
  Event first = MustEvent();
  auto pair = SocketPair();
  Fd& ours = pair.first;  // a reference: lambdas cannot capture structured bindings
  Fd& theirs = pair.second;
  Event reused = MustEvent();
  const int number = ours.get();
  int stale = 0, wrong = 0;
  // Both are ready in one round. The first handler to run closes the other's descriptor and opens
  // another file with the same number.
  bool swapped = false;
  const auto swap = [&] {
    if (std::exchange(swapped, true)) return;
    loop.Unwatch(number);
    ours.Close();
    ASSERT_EQ(::dup2(reused.fd(), number), number);
    ASSERT_TRUE(loop.Watch(number, [&](EventLoop::Ready) { ++wrong; }).ok());
  };
  ASSERT_TRUE(loop.Watch(first.fd(),
                         [&](EventLoop::Ready) {
                           first.Drain();
                           swap();
                         })
                  .ok());
  ASSERT_TRUE(loop.Watch(number, [&](EventLoop::Ready) { ++stale; }).ok());
  first.Signal();  // becomes ready first, so its handler runs first
  ASSERT_EQ(::send(theirs.get(), "x", 1, 0), 1);
  loop.RunOnce(std::nullopt);
  EXPECT_TRUE(swapped);
  EXPECT_EQ(stale, 0);
  EXPECT_EQ(wrong, 0);
  reused.Signal();
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(wrong, 1);
  loop.Unwatch(number);
  ::close(number);
}

TEST(EventLoop, AHandlerMayUnwatchItselfAndOthers) {
  EventLoop loop = MustLoop();
  std::vector<Event> events;
  for (int i = 0; i < 80; ++i) events.push_back(MustEvent());
  int calls = 0;
  // The first handler to run removes all, including itself, while its captures are in use.
  for (Event& event : events) {
    ASSERT_TRUE(loop.Watch(event.fd(),
                           [&loop, &events, &calls](EventLoop::Ready) {
                             ++calls;
                             for (Event& each : events) loop.Unwatch(each.fd());
                             ++calls;
                           })
                    .ok());
    event.Signal();
  }
  for (int round = 0; round < 3; ++round) loop.RunOnce(kNow);
  EXPECT_EQ(calls, 2);
}

TEST(EventLoop, AHandlerMayWatchMore) {
  EventLoop loop = MustLoop();
  std::vector<Event> events;
  for (int i = 0; i < 200; ++i) events.push_back(MustEvent());
  std::size_t next = 1;
  std::vector<int> calls(events.size(), 0);
  std::function<void(std::size_t)> watch = [&](std::size_t i) {
    ASSERT_TRUE(loop.Watch(events[i].fd(),
                           [&, i](EventLoop::Ready) {
                             events[i].Drain();
                             ++calls[i];
                             if (next < events.size()) watch(next++);
                           })
                    .ok());
    events[i].Signal();
  };
  watch(0);
  for (std::size_t round = 0; round < events.size() + 1; ++round) loop.RunOnce(kNow);
  for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], 1) << i;
}

TEST(EventLoop, TheSameDescriptorTwiceIsAnErrorAndTheFirstStays) {
  EventLoop loop = MustLoop();
  Event event = MustEvent();
  int first = 0, second = 0;
  ASSERT_TRUE(loop.Watch(event.fd(),
                         [&](EventLoop::Ready) {
                           ++first;
                           event.Drain();
                         })
                  .ok());
  EXPECT_FALSE(loop.Watch(event.fd(), [&](EventLoop::Ready) { ++second; }).ok());
  EXPECT_FALSE(loop.Watch(-1, [&](EventLoop::Ready) {}).ok());
  event.Signal();
  loop.RunOnce(std::nullopt);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 0);
}

TEST(EventLoop, SignalsFromAnotherThreadAreNeverLost) {
  EventLoop loop = MustLoop();
  Event event = MustEvent();
  std::atomic<std::uint64_t> posted{0};
  std::uint64_t seen = 0;
  constexpr std::uint64_t kPosts = 20000;
  ASSERT_TRUE(loop.Watch(event.fd(),
                         [&](EventLoop::Ready) {
                           event.Drain();
                           seen = posted.load();
                         })
                  .ok());
  std::thread poster([&] {
    for (std::uint64_t i = 0; i < kPosts; ++i) {
      posted.fetch_add(1);
      event.Signal();
    }
  });
  while (seen < kPosts) loop.RunOnce(std::nullopt);  // hangs if a signal is lost
  poster.join();
}

// The worker has the same open file description of a session's wake event, and so can change its
// flags.
TEST(Event, APeerThatMakesItBlockingCannotHangTheDrain) {
  Event event = MustEvent();
  Fd peer;
  ASSERT_TRUE(DuplicateFd(event.fd(), &peer).ok());
  ASSERT_EQ(::fcntl(peer.get(), F_SETFL, 0), 0);
  event.Drain();  // nothing to read: a blocking read would wait forever
  event.Signal();
  event.Drain();
  event.Drain();
}

}  // namespace
}  // namespace tessera
