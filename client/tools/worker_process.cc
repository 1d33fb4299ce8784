#include "client/tools/worker_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {
constexpr int kExitLimitMs = 5000;
}  // namespace

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(std::vector<std::string> args) {
  // A socket pair, not two pipes: writing to a dead process then gives an error, not SIGPIPE.
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return absl::UnavailableError(
        Concat("cannot create sockets for a worker process: ", std::strerror(errno)));
  }
  args.insert(args.begin(), bench::BinaryFolder() + "/tessera");
  std::vector<char*> raw;
  for (std::string& arg : args) raw.push_back(arg.data());
  raw.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {  // other threads may have held locks: only system calls are safe here
    ::dup2(ends[1], STDIN_FILENO);
    ::dup2(ends[1], STDOUT_FILENO);
    ::execv(raw[0], raw.data());
    ::_exit(127);
  }
  const int failure = errno;
  ::close(ends[1]);
  if (pid < 0) {
    ::close(ends[0]);
    return absl::UnavailableError(
        Concat("cannot start a worker process: ", std::strerror(failure)));
  }
  return std::unique_ptr<WorkerProcess>(new WorkerProcess(pid, ends[0]));
}

WorkerProcess::~WorkerProcess() {
  ::close(socket_);
  if (reaped_) return;
  // The process exits at the end of its stdin, after it has detached. A signal that arrives before
  // would make the daemon count its session as lost.
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  pollfd ended = {pidfd, POLLIN, 0};
  if (pidfd < 0 || ::poll(&ended, 1, kExitLimitMs) != 1) ::kill(pid_, SIGTERM);
  if (pidfd >= 0) ::close(pidfd);
  ::waitpid(pid_, nullptr, 0);
}

absl::Status WorkerProcess::Tell(std::string_view line) {
  const std::string text = Concat(line, "\n");
  for (std::size_t sent = 0; sent < text.size();) {
    const ssize_t count = ::send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Ended();
    sent += static_cast<std::size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> WorkerProcess::Hear() {
  std::array<char, 4096> piece;
  for (std::size_t looked = 0;;) {
    const std::size_t end = heard_.find('\n', looked);
    if (end != std::string::npos) {
      std::string line = heard_.substr(0, end);
      heard_.erase(0, end + 1);
      return line;
    }
    looked = heard_.size();
    const ssize_t count = ::recv(socket_, piece.data(), piece.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return Ended();
    heard_.append(piece.data(), static_cast<std::size_t>(count));
  }
}

absl::Status WorkerProcess::Ended() {
  int how = 0;
  if (reaped_ || ::waitpid(pid_, &how, 0) != pid_) {
    return absl::AbortedError(Concat("worker process ", pid_, " has ended"));
  }
  reaped_ = true;
  if (WIFSIGNALED(how)) {
    return absl::AbortedError(
        Concat("worker process ", pid_, " was killed by signal ", WTERMSIG(how)));
  }
  return absl::AbortedError(Concat("worker process ", pid_, " exited with status ",
                                   WEXITSTATUS(how), "; its own message is above"));
}

void Answer(std::string_view line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

}  // namespace tessera::cli
