// A minimal decode loop: one sequence of a model whose attention is nearly free.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/bench/workload/synthetic.h"
#include "tessera/v1/tessera.pb.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

class DecodeLoop {
 public:
  static constexpr SyntheticShape kShape = {
      .layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};

  static constexpr std::uint64_t kPrompt = 32;

  // The sequence is truncated to its prompt between steps whenever it has `longest` tokens.
  static absl::StatusOr<std::unique_ptr<DecodeLoop>> Open(const std::string& address,
                                                          std::uint64_t longest);

  std::uint64_t tokens() const { return sequence_.tokens(); }
  // Runs one step. `around` gets the AppendAndAttend of each layer and must call it once.
  absl::Status Step(absl::FunctionRef<void(absl::FunctionRef<void()>)> around);
  // A request for Attend by RPC over the sequence.
  v1::AttendRequest AttendRequest() const;

 private:
  explicit DecodeLoop(std::uint64_t longest)
      : longest_(longest), row_(64, 0x3c00), output_(64), lse_(1) {}
  const std::uint64_t longest_;
  std::unique_ptr<client::Worker> worker_;
  client::Sequence sequence_;
  std::vector<std::uint16_t> row_;
  std::vector<float> output_;
  std::vector<float> lse_;
};

// `tessera bench decode-loop`: the child process whose system calls are counted.
absl::Status RunDecodeLoop(const std::string& address, std::uint64_t steps);

}  // namespace tessera::cli::bench
