// Scores smoothed over their neighbours, so that what stands beside something important stays too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::kernels {

// Over `width` scores (odd) around each, as many on either side. Beyond the ends stand zeros, which
// count in the average, and nothing, which is never the largest.
std::vector<double> AveragePool(std::span<const double> scores, std::uint32_t width);
std::vector<double> LargestPool(std::span<const double> scores, std::uint32_t width);

}  // namespace tessera::kernels
