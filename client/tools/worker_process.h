// Another process of this program, for commands whose workers must not share one. It is told what
// to do by lines on its stdin, answers by lines on its stdout, and ends where its stdin does.
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
  // `tessera ARGS...`, of the `tessera` beside this binary. Its stderr is the caller's.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(std::vector<std::string> args);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Both: ABORTED says how the process ended, where it did.
  absl::Status Tell(std::string_view line);
  absl::StatusOr<std::string> Hear();

 private:
  WorkerProcess(pid_t pid, int socket) : pid_(pid), socket_(socket) {}
  absl::Status Ended();

  const pid_t pid_;
  const int socket_;
  std::string heard_;  // behind the last line that was given out
  bool reaped_ = false;
};

// The process's side: a line for whoever started it.
void Answer(std::string_view line);

}  // namespace tessera::cli
