#include "client/bench/measure/syscalls.h"

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera::cli::bench {

namespace {

// getpriority with one of these as `which` fails with EINVAL and has no effect.
constexpr long kBegin = 0x7e55e001;
constexpr long kEnd = 0x7e55e002;
constexpr int kSyscallStop = SIGTRAP | 0x80;

struct Call {
  std::uint64_t number;
  std::uint64_t argument;
};

Call Current(pid_t pid) {
  __ptrace_syscall_info info{};
  ::ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info);
  if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return {~std::uint64_t{0}, 0};
  return {info.entry.nr, info.entry.args[0]};
}

}  // namespace

void MarkBegin() { ::syscall(SYS_getpriority, kBegin, 0); }
void MarkEnd() { ::syscall(SYS_getpriority, kEnd, 0); }

absl::StatusOr<CountedRun> CountSystemCalls(const std::vector<std::string>& command) {
  std::vector<std::string> args = command;
  std::vector<char*> raw;
  for (std::string& arg : args) raw.push_back(arg.data());
  raw.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) return absl::UnavailableError("cannot start a process to trace");
  if (pid == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(126);
    ::execv(raw[0], raw.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (!WIFSTOPPED(status)) return absl::UnavailableError("this system does not allow ptrace");
  ::ptrace(PTRACE_SETOPTIONS, pid, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
  CountedRun run;
  bool counting = false;
  bool ended = false;
  for (long signal = 0;;) {
    if (::ptrace(PTRACE_SYSCALL, pid, nullptr, signal) != 0) break;
    if (::waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) break;
    signal = WSTOPSIG(status) == kSyscallStop ? 0 : WSTOPSIG(status);
    if (WSTOPSIG(status) != kSyscallStop) continue;
    const Call call = Current(pid);
    if (call.number == ~std::uint64_t{0}) continue;  // exit from a system call
    if (call.number == SYS_getpriority && call.argument == kBegin) {
      counting = true;
    } else if (call.number == SYS_getpriority && call.argument == kEnd) {
      counting = false;
      ended = true;
    } else if (counting) {
      ++run.calls;
      if (run.numbers.size() < 64) run.numbers.push_back(call.number);
    }
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || !ended) {
    return absl::InternalError(Concat("the traced run of ", command.front(), " failed"));
  }
  return run;
}

}  // namespace tessera::cli::bench
