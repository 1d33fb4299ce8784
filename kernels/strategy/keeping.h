// Ways to keep some of a rotated row's channels, and the loss of each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/strategy/moments.h"
#include "kernels/strategy/sample.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {

// Keeps `kept` channels of each row in groups of `group` channels that are adjacent in `order`.
struct Keeping {
  std::uint32_t kept = 0;
  std::uint32_t group = 1;
  const ChannelOrder* order = nullptr;  // null: the rotation's order
};

// The mean loss over these rows of one side, for each way of keeping.
std::vector<double> MeanLosses(const RowSpan& rows, std::span<const RowRange> ranges,
                               const StoredRotation& rotation, std::span<const Keeping> ways,
                               const Operations& operations);

}  // namespace tessera::kernels
