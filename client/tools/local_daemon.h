// A tesserad of the benchmark's own, on a socket in a temporary folder; both gone with the object,
// or with this process.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::bench {

class LocalDaemon {
 public:
  // A process that removes the folder when the pipe is closed.
  struct Keeper {
    pid_t pid = -1;
    int pipe = -1;
  };
  // The tesserad beside this binary. Waits until it serves. `config`: what --config would name.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const std::vector<std::string>& flags,
                                                            const std::string& config = "");
  ~LocalDaemon();

  std::string address() const { return "unix:" + folder_ + "/tesserad.sock"; }
  // CPU time of all its threads so far, from the scheduler's own books (nanoseconds).
  double CpuSeconds() const;

 private:
  LocalDaemon(pid_t pid, const Keeper& keeper, std::string folder)
      : pid_(pid), keeper_(keeper), folder_(std::move(folder)) {}
  absl::Status WaitUntilItServes(const std::string& binary);

  pid_t pid_;  // -1: it has ended
  const Keeper keeper_;
  const std::string folder_;
};

// The folder of the running binary.
std::string BinaryFolder();
// The recall model, in the source tree that this binary was built in.
std::string RecallFolder();

}  // namespace tessera::cli::bench
