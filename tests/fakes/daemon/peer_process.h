// Plays a hostile or dying worker in a forked child.
//
// The child runs a function with one end of a socket pair, and sends each line of its report back
// as text. The parent asserts, so the child never touches the test framework.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <string>

#include "daemon/platform/fd.h"

namespace tessera {

class PeerProcess {
 public:
  // Forks and runs `body(socket)`, whose result is the child's exit status. No other thread of the
  // test may run at the time of the fork.
  explicit PeerProcess(const std::function<int(int socket)>& body) {
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      ::_exit(body(ends[1]));
    }
    ::close(ends[1]);
    socket_ = Fd(ends[0]);
  }
  ~PeerProcess() {
    if (pid_ > 0) {
      Kill();
      (void)Wait();
    }
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  bool started() const { return pid_ > 0; }
  int socket() const { return socket_.get(); }
  pid_t pid() const { return pid_; }
  void Kill() { ::kill(pid_, SIGKILL); }

  // Returns the exit status, or 128 + signal if a signal ended the child.
  int Wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_ = -1;
  Fd socket_;
};

}  // namespace tessera
