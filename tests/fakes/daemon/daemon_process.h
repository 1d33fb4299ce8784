// Runs a real tesserad as a child process. The daemon gets its own folder, which is removed with
// the object, and a Unix socket in it. The destructor kills the daemon if it still runs.
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
    std::vector<std::string> flags;  // beside --listen; they override these defaults:
    std::string pool_bytes = "512MiB";
    std::string folder;                    // empty: a new temporary folder
    std::string listen = "tesserad.sock";  // in the folder; may contain {uuid}
    std::string uuid;                      // of the device, if `listen` contains {uuid}
    std::string config_json;               // written to a file and passed as --config
    std::string binary;                    // empty: tesserad
  };
  // Returns null if the daemon does not serve within 20 s, and prints its output to the test's.
  static std::unique_ptr<DaemonProcess> Start(const Options& options);
  ~DaemonProcess();

  pid_t pid() const { return pid_; }
  const std::string& folder() const { return folder_; }
  std::string socket_path() const { return folder_ + "/" + socket_; }
  std::string address() const { return "unix:" + socket_path(); }
  // A new connection that shares no channel with the rest of the process.
  std::shared_ptr<grpc::Channel> Connect() const;
  // The same to the operator's socket.
  std::shared_ptr<grpc::Channel> ConnectAdmin() const;
  // Everything that the daemon has written to stderr so far.
  std::string Log() const;

  void Kill(int signal);
  // Whether the daemon has not exited yet.
  bool Lives() const;
  // Waits for the daemon to exit. Returns the exit status, or -signal. Kills the daemon after
  // `seconds` and returns -999.
  int WaitForExit(int seconds);

  // Resources of the daemon, from /proc.
  int OpenFds() const;
  int Mappings() const;
  double CpuSeconds() const;
  // Private anonymous memory: neither files nor shared mappings.
  std::uint64_t HeapBytes() const;

 private:
  DaemonProcess(pid_t pid, std::string folder, std::string socket, std::string log,
                bool owns_folder)
      : pid_(pid),
        folder_(std::move(folder)),
        socket_(std::move(socket)),
        log_(std::move(log)),
        owns_folder_(owns_folder) {}
  pid_t pid_;
  std::string folder_;
  std::string socket_;  // the name of the file
  std::string log_;
  bool owns_folder_;
  bool reaped_ = false;
};

// Runs tesserad with these arguments until it exits. For configurations that it must refuse.
struct FinishedDaemon {
  int exit_code;
  std::string output;  // stdout and stderr
};
FinishedDaemon RunDaemonToEnd(const std::vector<std::string>& args);

// A new folder in the system's temporary folder. The caller removes it.
std::string MakeTemporaryFolder();

}  // namespace tessera::fakes
