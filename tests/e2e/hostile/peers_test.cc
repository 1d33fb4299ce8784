// Access to the Unix sockets by the peer's user and group, as reported by the kernel. Needs root,
// to act as other users.

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>

#include "daemon/platform/unix_socket.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

enum Met : int { kGreeted = 0, kCutOff = 1, kNotConnected = 2 };

// Connects from a process of that user and group. gRPC greets only a peer that it serves.
Met ConnectAs(uid_t user, gid_t group, const std::string& path) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgroups(1, &group) != 0 || ::setgid(65534) != 0 || ::setuid(user) != 0) ::_exit(9);
    const absl::StatusOr<Fd> socket = ConnectUnix(path);
    if (!socket.ok()) ::_exit(kNotConnected);
    char byte = 0;
    ::_exit(::read(socket->get(), &byte, 1) == 1 ? kGreeted : kCutOff);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? static_cast<Met>(WEXITSTATUS(status)) : kNotConnected;
}

// The log, once it has the line: a thread of its own writes it.
std::string LogWith(const DaemonProcess& daemon, const std::string& part) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::string log = daemon.Log();
  while (log.find(part) == std::string::npos && std::chrono::steady_clock::now() < deadline) {
    log = daemon.Log();
  }
  return log;
}

TEST(Peers, OnlyThoseWhoAreListedConnectWhateverTheFileModeSays) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be other users";
  const auto daemon = DaemonProcess::Start(
      {.flags = {"--unix-socket-mode=0666", "--unix-peers=uid:12345,gid:777"}});
  ASSERT_NE(daemon, nullptr);
  const std::string path = daemon->socket_path();
  ASSERT_EQ(::chmod(std::filesystem::path(path).parent_path().c_str(), 0711), 0);
  EXPECT_EQ(ConnectAs(12345, 5, path), kGreeted);
  EXPECT_EQ(ConnectAs(23456, 777, path), kGreeted);
  EXPECT_EQ(ConnectAs(23456, 778, path), kCutOff);
  EXPECT_EQ(ConnectAs(777, 12345, path), kCutOff);
  EXPECT_THAT(
      LogWith(*daemon, "of user 23456"),
      AllOf(HasSubstr("connection refused address=unix:" + path), HasSubstr("of user 23456"),
            HasSubstr("admits uid:12345,gid:777"), Not(HasSubstr("of user 12345"))));
  // A peer that may not call may not get memory either.
  EXPECT_EQ(ConnectAs(34567, 5, path + ".fd"), kCutOff);
  EXPECT_THAT(LogWith(*daemon, "of user 34567"),
              AllOf(HasSubstr("descriptor connection refused"), HasSubstr("of user 34567")));
  fakes::RawWorker own(daemon->Connect());
  EXPECT_TRUE(own.Attach().ok());
}

}  // namespace
}  // namespace tessera
