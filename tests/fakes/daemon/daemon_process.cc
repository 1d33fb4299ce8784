#include "tests/fakes/daemon/daemon_process.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::fakes {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // the sanitizers make calls of their own
#else
constexpr bool kSanitized = false;
#endif

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

pid_t Spawn(std::string binary, const std::vector<std::string>& args, const std::string& output) {
  std::vector<char*> raw;
  raw.push_back(binary.data());
  std::vector<std::string> copies = args;
  for (std::string& arg : copies) raw.push_back(arg.data());
  raw.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(out, STDERR_FILENO);
  ::execv(raw[0], raw.data());
  ::_exit(127);
}

}  // namespace

std::string MakeTemporaryFolder() {
  std::string pattern = std::filesystem::temp_directory_path() / "tessera-test-XXXXXX";
  return ::mkdtemp(pattern.data()) == nullptr ? std::string() : pattern;
}

std::unique_ptr<DaemonProcess> DaemonProcess::Start(const Options& options) {
  const bool owns_folder = options.folder.empty();
  const std::string folder = owns_folder ? MakeTemporaryFolder() : options.folder;
  std::string socket = options.listen;
  if (const std::size_t at = socket.find("{uuid}"); at != std::string::npos) {
    socket.replace(at, 6, options.uuid);
  }
  // Daemons that share a folder have a file each.
  const std::string log = folder + "/log" + (options.uuid.empty() ? "" : "-" + options.uuid);
  std::vector<std::string> args = {
      "--listen=unix:" + folder + "/" + options.listen, "--pool-bytes=" + options.pool_bytes,
      "--metrics=",
      // A call that the daemon turns out to need fails its test.
      kSanitized ? "--unused-system-calls=allow" : "--unused-system-calls=kill",
      "--staging-bytes=4MiB", "--tail-extent-bytes=2MiB", "--pool-extent-bytes=16MiB"};
  if (options.binary.empty()) args.push_back("--device=cpu");  // Tests map CPU memory.
  if (!options.config_json.empty()) {
    const std::string path = folder + "/config.json";
    std::ofstream(path) << options.config_json;
    args.push_back("--config=" + path);
  }
  args.insert(args.end(), options.flags.begin(), options.flags.end());
  const pid_t pid = Spawn(options.binary.empty() ? TESSERAD_BINARY : options.binary, args, log);
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess(pid, folder, socket, log, owns_folder));
  const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(20);
  const std::shared_ptr<grpc::Channel> channel = daemon->Connect();
  // Polls at short intervals, so that a daemon that exits immediately is noticed immediately.
  while (std::chrono::system_clock::now() < deadline) {
    if (channel->WaitForConnected(std::chrono::system_clock::now() +
                                  std::chrono::milliseconds(200))) {
      return daemon;
    }
    if (::waitpid(pid, nullptr, WNOHANG) == pid) {
      daemon->reaped_ = true;
      break;
    }
  }
  std::fprintf(stderr, "tesserad did not serve:\n%s\n", daemon->Log().c_str());
  return nullptr;
}

DaemonProcess::~DaemonProcess() {
  if (!reaped_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  if (owns_folder_) std::filesystem::remove_all(folder_, ignored);
}

namespace {

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt("grpc.use_local_subchannel_pool", 1);
  arguments.SetInt("grpc.enable_http_proxy", 0);
  arguments.SetInt("grpc.initial_reconnect_backoff_ms", 20);
  arguments.SetInt("grpc.min_reconnect_backoff_ms", 20);
  arguments.SetInt("grpc.max_reconnect_backoff_ms", 100);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

std::shared_ptr<grpc::Channel> DaemonProcess::Connect() const { return ConnectTo(address()); }

std::shared_ptr<grpc::Channel> DaemonProcess::ConnectAdmin() const {
  return ConnectTo(Concat(address(), kAdminSuffix));
}

std::string DaemonProcess::Log() const { return ReadAll(log_); }

void DaemonProcess::Kill(int signal) { ::kill(pid_, signal); }

bool DaemonProcess::Lives() const {
  siginfo_t ended{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         ended.si_pid == 0;
}

int DaemonProcess::WaitForExit(int seconds) {
  int status = 0;
  // A pidfd becomes readable when the process ends, so the wait needs no sleep and has a timeout.
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  pollfd poll = {pidfd, POLLIN, 0};
  const bool ended = ::poll(&poll, 1, seconds * 1000) == 1;
  ::close(pidfd);
  if (!ended) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, &status, 0);
    reaped_ = true;
    return -999;
  }
  ::waitpid(pid_, &status, 0);
  reaped_ = true;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int DaemonProcess::OpenFds() const {
  int count = 0;
  std::error_code error;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid_) + "/fd", error)) {
    ++count;
  }
  return error ? -1 : count;
}

int DaemonProcess::Mappings() const {
  // Counts shared mappings only: gRPC changes the number of heaps and thread stacks.
  std::istringstream maps(ReadAll("/proc/" + std::to_string(pid_) + "/maps"));
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:tessera-") != std::string::npos;
  }
  return count;
}

double DaemonProcess::CpuSeconds() const {
  const std::string stat = ReadAll("/proc/" + std::to_string(pid_) + "/stat");
  std::istringstream fields(stat.substr(stat.rfind(')') + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::uint64_t DaemonProcess::HeapBytes() const {
  std::istringstream status(ReadAll("/proc/" + std::to_string(pid_) + "/status"));
  for (std::string line; std::getline(status, line);) {
    std::uint64_t kib = 0;
    if (std::sscanf(line.c_str(), "RssAnon: %" SCNu64 " kB", &kib) == 1) return kib << 10;
  }
  return 0;
}

FinishedDaemon RunDaemonToEnd(const std::vector<std::string>& args) {
  const std::string folder = MakeTemporaryFolder();
  const pid_t pid = Spawn(TESSERAD_BINARY, args, folder + "/log");
  int status = 0;
  ::waitpid(pid, &status, 0);
  const FinishedDaemon finished = {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
                                   ReadAll(folder + "/log")};
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return finished;
}

}  // namespace tessera::fakes
