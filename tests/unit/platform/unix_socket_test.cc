#include "daemon/platform/unix_socket.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/daemon/peer_process.h"

namespace tessera {
namespace {

class UnixSocket : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    left_ = Fd(ends[0]);
    right_ = Fd(ends[1]);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Sends `fds` descriptors with `bytes` of data, without SendMessage.
  void SendRaw(int socket, std::string_view bytes, const std::vector<int>& fds) {
    std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
    iovec io{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
    ASSERT_EQ(::sendmsg(socket, &message, 0), static_cast<ssize_t>(bytes.size()));
  }

  std::string folder_;
  Fd left_;
  Fd right_;
};

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST_F(UnixSocket, PassesADescriptorThatIsCloseOnExec) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  Fd read_end(pipe_ends[0]), write_end(pipe_ends[1]);
  ASSERT_TRUE(SendMessage(left_.get(), Bytes("hello"), write_end.get()).ok());
  std::array<std::byte, 5> got;
  Fd passed;
  ASSERT_TRUE(ReceiveMessage(right_.get(), got, &passed).ok());
  EXPECT_EQ(std::memcmp(got.data(), "hello", 5), 0);
  ASSERT_TRUE(passed.valid());
  EXPECT_EQ(::fcntl(passed.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  ASSERT_EQ(::write(passed.get(), "x", 1), 1);
  char byte = 0;
  ASSERT_EQ(::read(read_end.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
}

TEST_F(UnixSocket, APeerThatSendsTooManyDescriptorsLeaksNone) {
  const int before = CountOpenFds();
  // More descriptors than there is room for, in one message or spread over single bytes.
  for (std::size_t count :
       {std::size_t{1}, std::size_t{2}, std::size_t{8}, std::size_t{9}, std::size_t{60}}) {
    SendRaw(left_.get(), "12345678", std::vector<int>(count, left_.get()));
    std::array<std::byte, 8> got;
    Fd passed;
    ASSERT_TRUE(ReceiveMessage(right_.get(), got, &passed).ok()) << count;
    EXPECT_TRUE(passed.valid()) << count;
    passed.Close();
    EXPECT_EQ(CountOpenFds(), before) << count;

    for (int i = 0; i < 8; ++i) {
      SendRaw(left_.get(), "x", std::vector<int>(count, left_.get()));
    }
    ASSERT_TRUE(ReceiveMessage(right_.get(), got, &passed).ok()) << count;
    passed.Close();
    EXPECT_EQ(CountOpenFds(), before) << count;
    // The same if none is expected.
    SendRaw(left_.get(), "12345678", std::vector<int>(count, left_.get()));
    ASSERT_TRUE(ReceiveMessage(right_.get(), got).ok());
    EXPECT_EQ(CountOpenFds(), before) << count;
  }
}

TEST_F(UnixSocket, AMessageInPiecesArrivesWhole) {
  std::thread sender([&] {
    for (char c : std::string("abcdefgh")) {
      EXPECT_EQ(::send(left_.get(), &c, 1, 0), 1);
    }
  });
  std::array<std::byte, 8> got;
  EXPECT_TRUE(ReceiveMessage(right_.get(), got).ok());
  sender.join();
  EXPECT_EQ(std::memcmp(got.data(), "abcdefgh", 8), 0);
}

TEST_F(UnixSocket, MessagesDoNotRunIntoEachOther) {
  ASSERT_TRUE(SendMessage(left_.get(), Bytes("onetwo"), left_.get()).ok());
  std::array<std::byte, 3> got;
  Fd passed;
  ASSERT_TRUE(ReceiveMessage(right_.get(), got, &passed).ok());
  EXPECT_EQ(std::memcmp(got.data(), "one", 3), 0);
  Fd none;
  ASSERT_TRUE(ReceiveMessage(right_.get(), got, &none).ok());
  EXPECT_EQ(std::memcmp(got.data(), "two", 3), 0);
  EXPECT_FALSE(none.valid());
}

TEST_F(UnixSocket, APeerThatClosesGivesUnavailable) {
  ASSERT_TRUE(SendMessage(left_.get(), Bytes("abc")).ok());
  left_.Close();
  std::array<std::byte, 8> got;
  EXPECT_EQ(ReceiveMessage(right_.get(), got).code(), absl::StatusCode::kUnavailable);
  // Nor SIGPIPE, which would end this process.
  EXPECT_EQ(SendMessage(right_.get(), Bytes("abc")).code(), absl::StatusCode::kUnavailable);
}

TEST_F(UnixSocket, AFullNonBlockingSocketIsAnErrorAndNoHang) {
  ASSERT_EQ(::fcntl(left_.get(), F_SETFL, O_NONBLOCK), 0);
  const std::vector<std::byte> large(64 * 1024 * 1024);
  EXPECT_EQ(SendMessage(left_.get(), large).code(), absl::StatusCode::kUnavailable);
}

TEST_F(UnixSocket, HasRoomWhileThePeerReads) {
  const int small = 4096;
  ASSERT_EQ(::setsockopt(left_.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  int unread = 0;
  while (HasRoom(left_.get()) && unread < 100) {
    ASSERT_TRUE(SendMessage(left_.get(), Bytes("abc")).ok());
    ++unread;
  }
  EXPECT_GE(unread, 1);
  EXPECT_LE(unread, 8);
  std::array<std::byte, 3> got;
  for (int i = 0; i < unread; ++i) ASSERT_TRUE(ReceiveMessage(right_.get(), got).ok());
  EXPECT_TRUE(HasRoom(left_.get()));
}

TEST_F(UnixSocket, TooManyDescriptorsUnderWayAreToldApart) {
  // The kernel limits them per user, except for the superuser.
  PeerProcess sender([this](int) {
    constexpr uid_t kSomebody = 54321;
    if (::geteuid() == 0 && ::setresuid(kSomebody, kSomebody, kSomebody) != 0) return 2;
    const rlimit few = {.rlim_cur = 32, .rlim_max = 32};
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return 3;
    for (int sent = 0; sent < 64; ++sent) {
      const absl::Status status = SendMessage(left_.get(), Bytes("x"), left_.get());
      if (status.ok()) continue;
      if (!absl::IsResourceExhausted(status)) return 4;
      return SendMessage(left_.get(), Bytes("y")).ok() ? 0 : 5;
    }
    return 6;
  });
  EXPECT_EQ(sender.Wait(), 0);
}

TEST_F(UnixSocket, ReplacesALeftoverAndSetsTheMode) {
  const std::string path = folder_ + "/s";
  for (unsigned mode : {0600u, 0660u, 0666u}) {
    absl::StatusOr<Fd> listening = ListenUnix(path, mode, false);
    ASSERT_TRUE(listening.ok()) << listening.status();
    struct stat info {};
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, mode);
    absl::StatusOr<Fd> client = ConnectUnix(path);
    ASSERT_TRUE(client.ok()) << client.status();
    Fd served(::accept4(listening->get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(served.valid());
    absl::StatusOr<PeerCredentials> peer = PeerOf(served.get());
    ASSERT_TRUE(peer.ok());
    EXPECT_EQ(peer->pid, ::getpid());
    EXPECT_EQ(peer->uid, ::getuid());
  }
}

TEST_F(UnixSocket, APathThatIsTooLongIsRefusedWithTheLimit) {
  const std::string path = folder_ + "/" + std::string(MaxUnixPath(), 'x');
  const absl::StatusOr<Fd> listening = ListenUnix(path, 0600, false);
  ASSERT_EQ(listening.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(listening.status().ToString().find(std::to_string(MaxUnixPath())), std::string::npos);
  EXPECT_EQ(ConnectUnix(path).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConnectUnix("").status().code(), absl::StatusCode::kInvalidArgument);

  const std::string longest = folder_ + "/" + std::string(MaxUnixPath() - folder_.size() - 1, 'y');
  EXPECT_TRUE(ListenUnix(longest, 0600, false).ok());
}

TEST_F(UnixSocket, NobodyListeningGivesUnavailable) {
  EXPECT_EQ(ConnectUnix(folder_ + "/nobody").status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tessera
