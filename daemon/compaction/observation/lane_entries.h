// The positions and weights of a lane's entries, for token policies.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/cache/segment/recode.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class LaneEntryList {
 public:
  // Lists all entries of the run, settled segments first.
  explicit LaneEntryList(const cache::OpenRun& run);

  policies::LaneEntries view() const {
    return {.count = positions_.size(),
            .positions = positions_,
            .weights = weights_,
            .before = before_};
  }
  std::uint64_t tokens() const { return tokens_; }  // tokens of the lane, up to the last entry

 private:
  void Add(const cache::HeldSegment& held);

  std::vector<std::uint64_t> positions_;
  std::vector<float> weights_;  // empty: every weight is 1
  std::uint64_t before_;
  std::uint64_t tokens_;
};

}  // namespace tessera::compaction
