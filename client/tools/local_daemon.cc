#include "client/tools/local_daemon.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "daemon/base/strings.h"

namespace tessera::cli::bench {

std::string BinaryFolder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

std::string RecallFolder() { return BinaryFolder() + "/../../tests/golden/recall"; }

namespace {

// Starts a process that waits for the other end of a pipe to close, which happens however this
// process ends, and then removes the folder.
LocalDaemon::Keeper StartKeeper(const std::string& folder) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {};
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setsid();  // Ctrl-C at the terminal must not reach it
    ::close(ends[1]);
    char nothing;
    while (::read(ends[0], &nothing, 1) < 0 && errno == EINTR) {
    }
    ::execl("/bin/rm", "rm", "-rf", "--", folder.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(ends[0]);
  return {.pid = pid, .pipe = ends[1]};
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalDaemon>> LocalDaemon::Start(
    const std::vector<std::string>& flags, const std::string& config) {
  std::string folder = std::filesystem::temp_directory_path() / "tessera-bench-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) {
    return absl::InternalError(Concat("cannot create the temporary folder ", folder));
  }
  std::vector<std::string> args = {BinaryFolder() + "/tesserad",
                                   Concat("--listen=unix:", folder, "/tesserad.sock"),
                                   "--device=cpu",
                                   "--metrics=",
                                   "--pool-bytes=1GiB",
                                   "--log-level=error"};
  args.insert(args.end(), flags.begin(), flags.end());
  if (!config.empty()) {
    std::ofstream(folder + "/config.json") << config;
    args.push_back(Concat("--config=", folder, "/config.json"));
  }
  std::vector<char*> raw;
  for (std::string& arg : args) raw.push_back(arg.data());
  raw.push_back(nullptr);
  const Keeper keeper = StartKeeper(folder);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // The daemon must not outlive a killed command.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::execv(raw[0], raw.data());
    ::_exit(127);
  }
  if (pid < 0) return absl::InternalError("cannot start a process for the temporary daemon");
  std::unique_ptr<LocalDaemon> daemon(new LocalDaemon(pid, keeper, folder));
  if (absl::Status status = daemon->WaitUntilItServes(args[0]); !status.ok()) return status;
  return daemon;
}

absl::Status LocalDaemon::WaitUntilItServes(const std::string& binary) {
  using std::chrono::system_clock;
  const auto channel = grpc::CreateChannel(address(), grpc::InsecureChannelCredentials());
  const auto deadline = system_clock::now() + std::chrono::seconds(15);
  while (!channel->WaitForConnected(system_clock::now() + std::chrono::milliseconds(100))) {
    int how = 0;
    if (::waitpid(pid_, &how, WNOHANG) == pid_) {
      pid_ = -1;
      const std::string end = WIFEXITED(how) ? Concat("exit status ", WEXITSTATUS(how))
                                             : Concat("signal ", WTERMSIG(how));
      return absl::UnavailableError(Concat(binary, " exited before it could serve, with ", end,
                                           ::access(binary.c_str(), X_OK) == 0
                                               ? "; run it by hand to see why"
                                               : ": the file is missing or not executable"));
    }
    if (system_clock::now() > deadline) {
      return absl::UnavailableError(Concat(binary, " did not accept connections within 15 s"));
    }
  }
  return absl::OkStatus();
}

LocalDaemon::~LocalDaemon() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (keeper_.pid > 0) {
    ::kill(keeper_.pid, SIGKILL);
    ::waitpid(keeper_.pid, nullptr, 0);
  }
  if (keeper_.pipe >= 0) ::close(keeper_.pipe);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

double LocalDaemon::CpuSeconds() const {
  double nanoseconds = 0;
  std::error_code error;
  for (const auto& task :
       std::filesystem::directory_iterator(Concat("/proc/", pid_, "/task"), error)) {
    double on_cpu = 0;
    if (std::ifstream(task.path() / "schedstat") >> on_cpu) nanoseconds += on_cpu;
  }
  return nanoseconds * 1e-9;
}

}  // namespace tessera::cli::bench
