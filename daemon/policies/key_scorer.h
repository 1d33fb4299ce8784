// Interface through which policies have the keys of a layer scored. Scores are computed where the
// keys are, so policies see sums but never keys.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/tokens/attention.h"

namespace tessera::policies {

// A call fails if the device fails or has no memory. The sums are then undefined.
class KeyScorer {
 public:
  virtual ~KeyScorer() = default;

  // Each look adds attention shares or products to its own sums. The looks of a call may run
  // concurrently.
  virtual absl::Status Look(std::uint32_t kv_head,
                            std::span<const kernels::KeyObservation> looks) = 0;
  // sums[t] += the squared length of the lane's key t.
  virtual absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) = 0;
  // sums[d] += the squares of channel d of the lane's first `count` keys.
  virtual absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                         std::span<double> sums) = 0;
  // How many looks one call may have at little more cost than one.
  virtual std::uint32_t observations_per_call() const = 0;
};

}  // namespace tessera::policies
