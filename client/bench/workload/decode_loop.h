// The smallest decode there is: one sequence of a model whose attention costs next to nothing.
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

  // Cut back to the prompt whenever the sequence has `longest` tokens (a few calls, between steps).
  static absl::StatusOr<std::unique_ptr<DecodeLoop>> Open(const std::string& address,
                                                          std::uint64_t longest);

  std::uint64_t tokens() const { return sequence_.tokens(); }
  // One step; `around` is given the append-and-attend of each layer to call.
  absl::Status Step(absl::FunctionRef<void(absl::FunctionRef<void()>)> around);
  // Attend by RPC over what the sequence holds.
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

// The program that the system calls of are counted: `tessera bench decode-loop`.
absl::Status RunDecodeLoop(const std::string& address, std::uint64_t steps);

}  // namespace tessera::cli::bench
