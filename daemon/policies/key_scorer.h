// What queries pay to the keys of a layer, computed where the keys are: policies see sums alone.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/tokens/attention.h"

namespace tessera::policies {

// Calls fail where the device fails, or has no memory for what they need; sums hold anything then.
class KeyScorer {
 public:
  virtual ~KeyScorer() = default;

  // Each look adds to its own sums. Those of one call may run at the same time.
  virtual absl::Status Look(std::uint32_t kv_head, std::span<const kernels::KeyLook> looks) = 0;
  // sums[t] += the squared length of the lane's key t.
  virtual absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) = 0;
  // sums[d] += the squares of channel d of the lane's first `count` keys.
  virtual absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                         std::span<double> sums) = 0;
  // So many looks in one call take little longer than one alone.
  virtual std::uint32_t looks_at_once() const = 0;
};

}  // namespace tessera::policies
