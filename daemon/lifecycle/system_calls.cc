#include "daemon/lifecycle/system_calls.h"

#include <fcntl.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "daemon/base/strings.h"

namespace tessera::lifecycle {
namespace {

using config::UnusedCalls;

// By what they are for. A name that this architecture does not have is skipped.
constexpr const char* kUsed[] = {
    // threads and waiting
    "exit", "exit_group", "futex", "futex_waitv", "get_robust_list", "gettid", "membarrier", "rseq",
    "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_setaffinity", "sched_yield",
    "set_robust_list", "set_tid_address", "clock_nanosleep", "nanosleep", "restart_syscall",
    // time
    "clock_getres", "clock_gettime", "gettimeofday", "time", "times",
    // signals
    "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend",
    "rt_sigtimedwait", "sigaltstack",
    // memory; the calls that could make code are below
    "brk", "get_mempolicy", "madvise", "mbind", "memfd_create", "mincore", "mlock", "mlock2",
    "mremap", "msync", "munlock", "munmap", "set_mempolicy",
    // descriptors
    "close", "close_range", "dup", "dup2", "dup3", "epoll_create", "epoll_create1", "epoll_ctl",
    "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "fcntl", "pipe", "pipe2",
    "poll", "ppoll", "pselect6", "select", "timerfd_create", "timerfd_settime",
    // files
    "access", "chmod", "faccessat", "faccessat2", "fadvise64", "fallocate", "fchmod", "fchmodat",
    "fdatasync", "flock", "fstat", "fstatfs", "fsync", "ftruncate", "getcwd", "getdents64", "lseek",
    "lstat", "mkdir", "mkdirat", "newfstatat", "open", "openat", "pread64", "preadv", "preadv2",
    "pwrite64", "pwritev", "pwritev2", "read", "readlink", "readlinkat", "readv", "rename",
    "renameat", "renameat2", "stat", "statfs", "statx", "umask", "unlink", "unlinkat", "write",
    "writev",
    // connections
    "accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen",
    "recvfrom", "recvmmsg", "recvmsg", "sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown",
    // what the process is
    "getcpu", "getegid", "geteuid", "getgid", "getpgrp", "getpid", "getppid", "getrandom",
    "getrusage", "getuid", "prlimit64", "sysinfo", "uname"};

constexpr int kThread = CLONE_VM | CLONE_THREAD;

std::uint32_t ActionOf(UnusedCalls unused) {
  switch (unused) {
    case UnusedCalls::kAllow:
      return SCMP_ACT_ALLOW;
    case UnusedCalls::kLog:
      return SCMP_ACT_LOG;
    case UnusedCalls::kAuto:
    case UnusedCalls::kRefuse:
      return SCMP_ACT_ERRNO(EPERM);
    case UnusedCalls::kKill:
      return SCMP_ACT_KILL_PROCESS;
  }
  return SCMP_ACT_KILL_PROCESS;
}

// The filter while it is made.
class Filter {
 public:
  explicit Filter(std::uint32_t otherwise) : context_(seccomp_init(otherwise)) {
    if (context_ == nullptr) {
      error_ = -ENOSYS;
      return;
    }
    Keep(seccomp_attr_set(context_.get(), SCMP_FLTATR_CTL_TSYNC, 1));
  }

  template <typename... Conditions>
  void Add(std::uint32_t action, const char* name, Conditions... conditions) {
    const int call = seccomp_syscall_resolve_name(name);
    if (call < 0 || error_ != 0) return;  // below 0: not of this architecture
    Keep(seccomp_rule_add(context_.get(), action, call, sizeof...(conditions), conditions...));
  }

  absl::Status Load() {
    if (error_ == 0) Keep(seccomp_load(context_.get()));
    if (error_ == 0) return absl::OkStatus();
    return absl::UnimplementedError(Concat("cannot limit system calls (errno ", -error_,
                                           "); "
                                           "--unused-system-calls=allow starts without"));
  }

 private:
  struct Release {
    void operator()(scmp_filter_ctx context) const { seccomp_release(context); }
  };

  void Keep(int result) {
    if (result < 0 && error_ == 0) error_ = result;
  }

  std::unique_ptr<void, Release> context_;
  int error_ = 0;  // the first, negative
};

}  // namespace

absl::Status LimitSystemCalls(UnusedCalls unused) {
  if (unused == UnusedCalls::kAllow) return absl::OkStatus();
  Filter filter(ActionOf(unused));
  for (const char* const name : kUsed) filter.Add(SCMP_ACT_ALLOW, name);
  // New threads, but no new processes and no namespaces. The C library falls back from clone3,
  // whose flags lie in memory where no filter sees them.
  filter.Add(SCMP_ACT_ERRNO(ENOSYS), "clone3");
  filter.Add(SCMP_ACT_ALLOW, "clone", SCMP_A0(SCMP_CMP_MASKED_EQ, kThread, kThread));
  // Memory, but never memory that can be executed.
  for (const char* const name : {"mmap", "mprotect"}) {
    filter.Add(SCMP_ACT_ALLOW, name, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
  }
  for (const int family : {AF_UNIX, AF_INET, AF_INET6}) {
    filter.Add(SCMP_ACT_ALLOW, "socket", SCMP_A0(SCMP_CMP_EQ, static_cast<scmp_datum_t>(family)));
  }
  // A thread of ZeroMQ says that it is an ordinary one, and aborts if it may not.
  filter.Add(SCMP_ACT_ALLOW, "sched_setscheduler", SCMP_A1(SCMP_CMP_EQ, SCHED_OTHER));
  // Signals to itself: a drain that an operator asked for, an abort.
  const auto self = static_cast<scmp_datum_t>(::getpid());
  for (const char* const name : {"kill", "tgkill"}) {
    filter.Add(SCMP_ACT_ALLOW, name, SCMP_A0(SCMP_CMP_EQ, self));
  }
  // Names of threads, and huge pages: none of the options that change rights.
  for (const int option : {PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, PR_GET_DUMPABLE}) {
    filter.Add(SCMP_ACT_ALLOW, "prctl", SCMP_A0(SCMP_CMP_EQ, static_cast<scmp_datum_t>(option)));
  }
  return filter.Load();
}

}  // namespace tessera::lifecycle
