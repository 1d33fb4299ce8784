// Reorders channels so that those which rows tend to keep together are adjacent. A group is kept or
// dropped as a unit, so a strong channel next to a weak one wastes space.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {

// Counts how often rows keep both of two channels, with each row keeping its strongest channels.
class KeptTogetherCounts {
 public:
  explicit KeptTogetherCounts(std::uint32_t channels)
      : channels_(channels), counts_(std::size_t{channels} * channels) {}

  // Adds one row with this many rotated channels.
  void Add(const float* rotated, std::uint32_t kept);

  std::uint32_t channels() const { return channels_; }
  std::uint32_t count(std::uint32_t a, std::uint32_t b) const {
    return counts_[(a < b ? a : b) * std::size_t{channels_} + (a < b ? b : a)];
  }

 private:
  std::uint32_t channels_;             // a multiple of 4
  std::vector<std::uint32_t> counts_;  // [channels][channels]; 0 below the diagonal
};

// An order that makes channels adjacent if they are often kept together. Pairs greedily, then pairs
// the pairs, so it serves groups of 2 and of 4. The group of the strongest channel comes first,
// then that of the strongest remaining channel, and so on.
ChannelOrder OrderByKeptTogether(const KeptTogetherCounts& together);

}  // namespace tessera::kernels
