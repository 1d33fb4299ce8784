// Which channels should stand side by side, so that groups of them are kept for all their channels'
// sake.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {

// How often rows keep two channels both, where each row keeps its strongest.
class CoKept {
 public:
  explicit CoKept(std::uint32_t channels)
      : channels_(channels), counts_(std::size_t{channels} * channels) {}

  // `rotated` has this many channels.
  void Add(const float* rotated, std::uint32_t kept);

  std::uint32_t channels() const { return channels_; }
  std::uint32_t count(std::uint32_t a, std::uint32_t b) const {
    return counts_[(a < b ? a : b) * std::size_t{channels_} + (a < b ? b : a)];
  }

 private:
  std::uint32_t channels_;             // a multiple of 4
  std::vector<std::uint32_t> counts_;  // [channels][channels]; below the diagonal 0
};

// An order in which those kept together most often are neighbours: pairs, greedily, then pairs of
// pairs. It serves groups of 2 and of 4. The strongest channel's four come first, then those of the
// strongest left.
ChannelOrder OrderByCoKept(const CoKept& together);

}  // namespace tessera::kernels
