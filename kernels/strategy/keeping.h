// Ways to keep some of a rotated row's channels, and what each loses.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/strategy/moments.h"
#include "kernels/strategy/sample.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {

// What is kept of each row: `kept` channels in groups of `group`, adjacent in this order of them.
struct Keeping {
  std::uint32_t kept = 0;
  std::uint32_t group = 1;
  const ChannelOrder* order = nullptr;  // null: as they are
};

// The mean loss over these rows of one side, for each way of keeping.
std::vector<double> MeanLosses(const RowSpan& rows, std::span<const RowRange> ranges,
                               const StoredRotation& rotation, std::span<const Keeping> ways,
                               const Operations& operations);

}  // namespace tessera::kernels
