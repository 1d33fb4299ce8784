#include "daemon/lifecycle/system_calls.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/netlink.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/lifecycle/privileges.h"

namespace tessera::lifecycle {
namespace {

using config::UnusedCalls;

// Limits are for good, so each case runs in a process of its own.
class SystemCalls : public testing::Test {
 protected:
  // Exit code of `body`, or 128 + the signal that ended it. The limits hold while it runs.
  static int Run(UnusedCalls unused, const std::function<int()>& body) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      GiveUpPrivileges({.core_dumps = false});
      const absl::Status limited = LimitSystemCalls(unused);
      if (!limited.ok()) std::fprintf(stderr, "%s\n", limited.ToString().c_str());
      ::_exit(limited.ok() ? body() : 99);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
};

struct Attempt {
  std::string what;
  std::function<bool()> works;
};

std::vector<Attempt> Attempts() {
  return {
      {"run a program",
       [] {
         ::execl("/bin/true", "true", nullptr);
         return false;  // what works does not return
       }},
      {"make a process", [] { return ::fork() >= 0; }},
      {"map code",
       [] {
         return ::mmap(nullptr, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) !=
                MAP_FAILED;
       }},
      {"make memory executable",
       [] {
         void* const page =
             ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
         return ::mprotect(page, 4096, PROT_READ | PROT_EXEC) == 0;
       }},
      {"trace", [] { return ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0; }},
      {"open another kind of socket",
       [] { return ::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE) >= 0; }},
      {"signal another process", [] { return ::kill(::getppid(), 0) == 0; }},
      {"be dumpable again", [] { return ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0; }},
      {"be served before others",
       [] {
         const sched_param parameter = {.sched_priority = 1};
         return ::sched_setscheduler(0, SCHED_FIFO, &parameter) == 0;
       }},
      {"become another user", [] { return ::setuid(::getuid()) == 0; }},
  };
}

TEST_F(SystemCalls, OthersFail) {
  for (const Attempt& attempt : Attempts()) {
    EXPECT_EQ(
        Run(UnusedCalls::kRefuse, [&] { return attempt.works()  ? 1
                                               : errno == EPERM ? 0
                                                                : 2; }), 0)
        << attempt.what;
  }
}

TEST_F(SystemCalls, OthersKill) {
  for (const Attempt& attempt : Attempts()) {
    EXPECT_EQ(Run(UnusedCalls::kKill, [&] { return attempt.works() ? 1 : 2; }), 128 + SIGSYS)
        << attempt.what;
  }
}

TEST_F(SystemCalls, WithoutLimitsTheyWork) {
  EXPECT_EQ(Run(UnusedCalls::kAllow,
                [] {
                  ::execl("/bin/true", "true", nullptr);
                  return 1;
                }),
            0);
}

TEST_F(SystemCalls, TheDaemonsOwnWork) {
  EXPECT_EQ(Run(UnusedCalls::kKill,
                [] {
                  int result = 1;
                  std::thread([&result] { result = 0; }).join();
                  std::free(std::malloc(std::size_t{64} << 20));
                  const int memory = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
                  if (memory < 0 || ::ftruncate(memory, 4096) != 0) return 2;
                  if (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) ==
                      MAP_FAILED) {
                    return 3;
                  }
                  if (::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) < 0) return 4;
                  if (::open("/proc/self/status", O_RDONLY | O_CLOEXEC) < 0) return 5;
                  if (::kill(::getpid(), 0) != 0) return 6;
                  return result;
                }),
            0);
}

TEST_F(SystemCalls, HoldForThreadsThatRunAlready) {
  EXPECT_EQ(Run(UnusedCalls::kAllow,
                [] {
                  std::atomic<bool> limited{false};
                  int error = 0;
                  std::thread earlier([&] {
                    limited.wait(false);
                    if (::setuid(::getuid()) != 0) error = errno;
                  });
                  if (!LimitSystemCalls(UnusedCalls::kRefuse).ok()) return 1;
                  limited.store(true);
                  limited.notify_all();
                  earlier.join();
                  return error == EPERM ? 0 : 2;
                }),
            0);
}

}  // namespace
}  // namespace tessera::lifecycle
