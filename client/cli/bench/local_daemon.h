// A tesserad of the benchmark's own, on a socket in a temporary folder; gone with the object.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli::bench {

class LocalDaemon {
 public:
  // The tesserad beside this binary. Waits until it serves. `config`: what --config would name.
  static absl::StatusOr<std::unique_ptr<LocalDaemon>> Start(const std::vector<std::string>& flags,
                                                            const std::string& config = "");
  ~LocalDaemon();

  std::string address() const { return "unix:" + folder_ + "/tesserad.sock"; }
  // CPU time of all its threads so far, from the scheduler's own books (nanoseconds).
  double CpuSeconds() const;

 private:
  LocalDaemon(pid_t pid, std::string folder) : pid_(pid), folder_(std::move(folder)) {}
  const pid_t pid_;
  const std::string folder_;
};

// The folder of the running binary.
std::string BinaryFolder();
// The recall model, in the source tree that this binary was built in.
std::string RecallFolder();

}  // namespace tessera::cli::bench
