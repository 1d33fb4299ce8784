// The entries of a lane as a token policy sees them: their positions and weights.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/cache/segment/recode.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class SeenEntries {
 public:
  // Of everything in the run, settled segments first.
  explicit SeenEntries(const cache::OpenRun& run);

  policies::LaneEntries view() const {
    return {.count = positions_.size(),
            .positions = positions_,
            .weights = weights_,
            .before = before_};
  }
  std::uint64_t tokens() const { return tokens_; }  // of the lane, until the last of them

 private:
  void Add(const cache::HeldSegment& held);

  std::vector<std::uint64_t> positions_;
  std::vector<float> weights_;  // empty: 1
  std::uint64_t before_;
  std::uint64_t tokens_;
};

}  // namespace tessera::compaction
