// A worker of `tessera bench sharing`, in a process of its own: it finds a published head, forks
// it, decodes a token on it and holds it until it is told to end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/worker_process.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

struct SharedHead {
  std::uint32_t layers = 1;
  std::uint32_t tokens = 0;
};
inline constexpr char kSharedPolicy[] = "mosaickv";

// Every layer has kKvHeads heads of kHeadDim, and as many query heads.
client::ModelGeometry GeometryOf(std::uint32_t layers);
// What stands for the text of the head number `head`: no two share a block of 32.
std::vector<std::uint32_t> TokenIds(std::uint32_t tokens, std::uint32_t head);

// What one step on the head has come to, and when.
struct FirstToken {
  double open_ms = 0;    // BeginStep: the tail is opened, the pool mapped
  double attend_ms = 0;  // the first layer's
  double rest_ms = 0;    // the other layers, and the end of the step
  // Of the last layer: the same for whoever reads the same.
  double lse = 0;
};
absl::StatusOr<FirstToken> Decode(client::Worker& worker, client::Sequence& sequence,
                                  std::uint32_t layers);

struct JoinTimes {
  double match_ms = 0;
  double fork_ms = 0;
  FirstToken token;
  double UntilFirstAttend() const { return match_ms + fork_ms + token.open_ms + token.attend_ms; }
};

class SharingWorker {
 public:
  // Attached when it returns.
  static absl::StatusOr<std::unique_ptr<SharingWorker>> Start(const std::string& address,
                                                              const SharedHead& head);
  // Match, Fork, a step. It goes on holding what it forked.
  absl::StatusOr<JoinTimes> Join();

 private:
  explicit SharingWorker(std::unique_ptr<WorkerProcess> process) : process_(std::move(process)) {}
  const std::unique_ptr<WorkerProcess> process_;
};

// The program of that process.
absl::Status RunSharingWorker(const std::string& address, const SharedHead& head);

}  // namespace tessera::cli::bench
