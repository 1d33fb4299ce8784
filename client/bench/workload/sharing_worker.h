// A worker of `tessera bench sharing` in a child process: matches a published prefix, forks it,
// decodes one token and holds the fork until its stdin ends.
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

struct SharedPrefix {
  std::uint32_t layers = 1;
  std::uint32_t tokens = 0;
};
inline constexpr char kSharedPolicy[] = "mosaickv";

// Every layer has kKvHeads kv heads of kHeadDim and as many query heads.
client::ModelGeometry GeometryOf(std::uint32_t layers);
// Token ids of prefix number `head`. No two prefixes share a block of 32.
std::vector<std::uint32_t> TokenIds(std::uint32_t tokens, std::uint32_t head);

// Times and result of the first decode step on the prefix.
struct FirstToken {
  double open_ms = 0;    // BeginStep: opens the tail, maps the pool
  double attend_ms = 0;  // attention of the first layer
  double rest_ms = 0;    // the other layers, and the end of the step
  // Sum over the heads of the last layer. Equal for all workers that read the same rows.
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
  // Returns once the process is attached.
  static absl::StatusOr<std::unique_ptr<SharingWorker>> Start(const std::string& address,
                                                              const SharedPrefix& head);
  // Match, Fork and one step. The process keeps the fork.
  absl::StatusOr<JoinTimes> Join();

 private:
  explicit SharingWorker(std::unique_ptr<WorkerProcess> process) : process_(std::move(process)) {}
  const std::unique_ptr<WorkerProcess> process_;
};

// Child side.
absl::Status RunSharingWorker(const std::string& address, const SharedPrefix& head);

}  // namespace tessera::cli::bench
