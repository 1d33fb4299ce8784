// Smooths scores over their neighbours, so that tokens next to an important one are kept as well.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::kernels {

// Each result covers `width` (odd) scores centred on its own. Missing scores beyond the ends count
// as zeros in AveragePool and are ignored in LargestPool.
std::vector<double> AveragePool(std::span<const double> scores, std::uint32_t width);
std::vector<double> LargestPool(std::span<const double> scores, std::uint32_t width);

}  // namespace tessera::kernels
