// A child process that runs this program again, for commands whose workers need separate processes.
// It reads commands line by line on stdin, answers line by line on stdout, and exits at the end of
// its stdin.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli {

class WorkerProcess {
 public:
  // Runs `tessera ARGS...` from this binary's folder. The child inherits stderr.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(std::vector<std::string> args);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Send and receive one line. ABORTED: the process has ended; the message says how.
  absl::Status Tell(std::string_view line);
  absl::StatusOr<std::string> Hear();

 private:
  WorkerProcess(pid_t pid, int socket) : pid_(pid), socket_(socket) {}
  absl::Status Ended();

  const pid_t pid_;
  const int socket_;
  std::string heard_;  // bytes received after the last line returned
  bool reaped_ = false;
};

// Child side: sends one line to the parent.
void Answer(std::string_view line);

}  // namespace tessera::cli
