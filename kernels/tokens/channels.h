// What the channels of rows weigh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/format/element.h"

namespace tessera::kernels {

// sums[d] += sum over rows of x_d^2, d below head_dim; rows lie one after another, and nothing is
// assumed of their alignment. In double: the squares of finite elements below 2^63 do not overflow.
void AddChannelSquares(const std::byte* rows, std::uint64_t count, std::uint32_t head_dim,
                       ElementType type, std::span<double> sums);

}  // namespace tessera::kernels
