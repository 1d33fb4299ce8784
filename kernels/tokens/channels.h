// The energy of each channel over many rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/format/element.h"

namespace tessera::kernels {

// sums[d] += sum over rows of x_d^2, for d < head_dim. Rows are contiguous and may be unaligned.
// Computed in double, so squares of elements below 2^63 do not overflow.
void AddChannelSquares(const std::byte* rows, std::uint64_t count, std::uint32_t head_dim,
                       ElementType type, std::span<double> sums);

}  // namespace tessera::kernels
