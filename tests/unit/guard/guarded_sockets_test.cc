#include "daemon/guard/guarded_sockets.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "daemon/platform/fd.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/http2_bytes.h"

namespace tessera {
namespace {

class Nobody final : public Registrar {
 public:
  TenantId Recognise(std::string_view begin) override {
    return begin == "known" ? TenantId(1) : TenantId();
  }
  absl::Status Joined(TenantId) override { return absl::OkStatus(); }
  void Left(TenantId) override {}
  bool Charge(TenantId, std::uint64_t, std::uint64_t) override { return true; }
  bool MustWait(TenantId, const FrameGuard&) override { return must_wait; }

  bool must_wait = false;
};

class GuardedSocketsTest : public testing::Test {
 protected:
  ~GuardedSocketsTest() override { sockets_.Clear(); }

  struct Pair {
    Fd daemon;
    Fd peer;
  };
  Pair Connect(bool guarded = true) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    if (guarded) {
      sockets_.Add(ends[0], std::make_shared<GuardedConnection>(GuardedConnection::Options{
                                .limits = {},
                                .registrar = &registrar_,
                                .clock = &clock_,
                                .on_cut = [this](const absl::Status& why) { cut_ = why; },
                                .on_wait = [this] { ++waits_; }}));
    }
    return {Fd(ends[0]), Fd(ends[1])};
  }
  static void Send(const Pair& pair, std::string_view bytes) {
    ASSERT_EQ(::send(pair.peer.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  // As gRPC reads. "" with errno if it fails.
  static std::string Receive(const Pair& pair) {
    std::array<char, 8> first;
    std::array<char, 256> second;
    std::array<iovec, 2> parts = {{{first.data(), first.size()}, {second.data(), second.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    errno = 0;
    const ssize_t count = ::recvmsg(pair.daemon.get(), &message, 0);
    if (count <= 0) return "";
    std::string bytes(first.data(), std::min<std::size_t>(count, first.size()));
    if (count > 8) bytes.append(second.data(), count - 8);
    return bytes;
  }
  static std::string Known() {
    return std::string(fakes::kHttp2Preface) + fakes::HeadersFrame(1) +
           fakes::DataFrame(1, fakes::GrpcMessage("known"));
  }

  FakeClock clock_;
  Nobody registrar_;
  GuardedSockets& sockets_ = GuardedSockets::OfProcess();
  absl::Status cut_;
  int waits_ = 0;
};

TEST_F(GuardedSocketsTest, GoodBytesPass) {
  const Pair pair = Connect();
  Send(pair, Known());
  EXPECT_EQ(Receive(pair), Known());
  EXPECT_TRUE(cut_.ok());
}

TEST_F(GuardedSocketsTest, BadBytesAreNotReadAndThePeerIsCut) {
  const Pair pair = Connect();
  Send(pair, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_EQ(Receive(pair), "");
  EXPECT_EQ(errno, ECONNRESET);
  EXPECT_FALSE(cut_.ok());
  // Its library can say that this is a server of HTTP/2.
  std::array<char, 32> answer{};
  EXPECT_EQ(::recv(pair.peer.get(), answer.data(), answer.size(), 0), 9);
  EXPECT_EQ(answer[3], 4) << "SETTINGS";
  EXPECT_EQ(::recv(pair.peer.get(), answer.data(), answer.size(), 0), 0) << "the end";
}

TEST_F(GuardedSocketsTest, BadFramesAreNotAnswered) {
  const Pair pair = Connect();
  Send(pair, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  Receive(pair);
  Send(pair, std::string("\x01\x00\x00\x01\x04\x00\x00\x00\x01", 9));  // headers of 64 KiB
  EXPECT_EQ(Receive(pair), "");
  EXPECT_FALSE(cut_.ok());
  char byte = 0;
  EXPECT_EQ(::recv(pair.peer.get(), &byte, 1, 0), 0) << "the end";
}

// The bytes stay in the socket, and epoll reports them once more when they may be read.
TEST_F(GuardedSocketsTest, WhoMustWaitReadsLater) {
  const Pair pair = Connect();
  const Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event = {.events = EPOLLIN | EPOLLET, .data = {}};
  const auto reported = [&epoll] {
    epoll_event ready{};
    return ::epoll_wait(epoll.get(), &ready, 1, 0) == 1 && (ready.events & EPOLLIN) != 0;
  };
  registrar_.must_wait = true;
  ASSERT_EQ(::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, pair.daemon.get(), &event), 0);
  Send(pair, Known() + fakes::HeadersFrame(3) +
                 fakes::DataFrame(3, fakes::GrpcMessage(std::string(65 << 10, 'x'), 1 << 20)));
  ASSERT_TRUE(reported());
  std::size_t read = 0;
  while (waits_ == 0) {
    const std::string part = Receive(pair);
    if (part.empty()) break;
    read += part.size();
  }
  EXPECT_GE(read, 64u << 10);
  Send(pair, fakes::DataFrame(3, "more"));
  EXPECT_TRUE(reported());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Receive(pair), "");
    EXPECT_EQ(errno, EAGAIN);
  }
  EXPECT_EQ(waits_, 1) << "told once";
  EXPECT_EQ(sockets_.Resume(), 1u);
  EXPECT_FALSE(reported());
  registrar_.must_wait = false;
  EXPECT_EQ(sockets_.Resume(), 0u);
  EXPECT_TRUE(reported());
  EXPECT_NE(Receive(pair), "");
  EXPECT_TRUE(cut_.ok()) << cut_;
}

TEST_F(GuardedSocketsTest, OtherSocketsAreReadAsEver) {
  const Pair guarded = Connect();
  const Pair other = Connect(/*guarded=*/false);
  Send(other, "anything");
  EXPECT_EQ(Receive(other), "anything");
}

TEST_F(GuardedSocketsTest, ANumberThatIsUsedAgainIsAnotherSocket) {
  Pair pair = Connect();
  const int number = pair.daemon.get();
  pair.daemon = Fd();
  Pair other = Connect(/*guarded=*/false);
  if (other.daemon.get() != number) {
    ASSERT_EQ(::dup2(other.daemon.get(), number), number);
    other.daemon = Fd(number);
  }
  Send(other, "anything");
  EXPECT_EQ(Receive(other), "anything");
  EXPECT_TRUE(cut_.ok());
}

TEST_F(GuardedSocketsTest, WhoStaysUnknownIsCut) {
  const Pair silent = Connect();
  const Pair known = Connect();
  Send(known, Known());
  ASSERT_NE(Receive(known), "");
  clock_.Advance(GuardedSockets::kUnknownLimit);
  EXPECT_EQ(sockets_.Sweep(clock_.Now()).unknown, 1u);
  EXPECT_TRUE(cut_.ok());
  clock_.Advance(std::chrono::milliseconds(1));
  EXPECT_EQ(sockets_.Sweep(clock_.Now()).all, 2u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(cut_)) << cut_;
  char byte = 0;
  EXPECT_EQ(::recv(silent.peer.get(), &byte, 1, 0), 0);
  EXPECT_EQ(::recv(known.peer.get(), &byte, 1, 0), -1);
}

TEST_F(GuardedSocketsTest, BytesThatWereSentBeforeTheCutAreNotRead) {
  const Pair pair = Connect();
  Send(pair, Known());
  ASSERT_TRUE(sockets_.CutOldestUnknown());
  EXPECT_EQ(Receive(pair), "");
  EXPECT_FALSE(sockets_.CutOldestUnknown());
}

TEST_F(GuardedSocketsTest, ClosedSocketsAreForgotten) {
  { const Pair pair = Connect(); }
  EXPECT_EQ(sockets_.Sweep(clock_.Now()).all, 0u);
  EXPECT_TRUE(sockets_.empty());
}

}  // namespace
}  // namespace tessera
