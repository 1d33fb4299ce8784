// A temporary tesserad on a socket in a temporary folder. Both are removed when the object is
// destroyed or this process ends, however it ends.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::bench {

class LocalDaemon {
 public:
  // A helper process that removes the folder once the pipe closes.
  struct Keeper {
    pid_t pid = -1;
    int pipe = -1;
  };
  // Starts the tesserad in this binary's folder and waits until it serves. `flags` are its command
  // line; `config`, if not empty, is the text of its configuration file.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const std::vector<std::string>& flags,
                                                            const std::string& config = "");
  ~LocalDaemon();

  std::string address() const { return "unix:" + folder_ + "/tesserad.sock"; }
  // CPU time of all its threads so far, from the scheduler's nanosecond accounts.
  double CpuSeconds() const;

 private:
  LocalDaemon(pid_t pid, const Keeper& keeper, std::string folder)
      : pid_(pid), keeper_(keeper), folder_(std::move(folder)) {}
  absl::Status WaitUntilItServes(const std::string& binary);

  pid_t pid_;  // -1: the daemon has exited
  const Keeper keeper_;
  const std::string folder_;
};

// The folder of the running binary.
std::string BinaryFolder();
// The recall model's folder, in the source tree this binary was built in.
std::string RecallFolder();

}  // namespace tessera::cli::bench
