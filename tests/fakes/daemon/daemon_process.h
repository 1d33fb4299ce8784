// A real tesserad as a child process, for tests that need the whole thing: in a folder of its own
// that goes with it, on a Unix socket in there, killed at the latest with the object.
#pragma once

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera::fakes {

class DaemonProcess {
 public:
  struct Options {
    std::vector<std::string> flags;  // beside the socket, and over these defaults:
    std::string pool_bytes = "512MiB";
    std::string folder;       // empty: a fresh temporary one
    std::string config_json;  // written to a file and passed as --config
    std::string binary;       // empty: tesserad
  };
  // Null where it does not serve within 20 s; what it printed is in the test's output then.
  static std::unique_ptr<DaemonProcess> Start(const Options& options);
  ~DaemonProcess();

  pid_t pid() const { return pid_; }
  const std::string& folder() const { return folder_; }
  std::string socket_path() const { return folder_ + "/tesserad.sock"; }
  std::string address() const { return "unix:" + socket_path(); }
  // A connection of its own, not shared with any other channel of the process.
  std::shared_ptr<grpc::Channel> Connect() const;
  // Everything it has written to stderr so far.
  std::string Log() const;

  void Kill(int signal);
  // Waits for its end; the exit status, or -signal. Kills it after `seconds` and returns -999.
  int WaitForExit(int seconds);

  // What it holds, from /proc.
  int OpenFds() const;
  int Mappings() const;
  double CpuSeconds() const;
  // Of its own: neither files nor what it shares.
  std::uint64_t HeapBytes() const;

 private:
  DaemonProcess(pid_t pid, std::string folder, bool owns_folder)
      : pid_(pid), folder_(std::move(folder)), owns_folder_(owns_folder) {}
  pid_t pid_;
  std::string folder_;
  bool owns_folder_;
  bool reaped_ = false;
};

// Runs tesserad with these arguments to its end; for configurations that must be refused.
struct FinishedDaemon {
  int exit_code;
  std::string output;  // stdout and stderr
};
FinishedDaemon RunDaemonToEnd(const std::vector<std::string>& args);

// A fresh folder under the system's temporary one. The caller removes it.
std::string MakeTemporaryFolder();

}  // namespace tessera::fakes
