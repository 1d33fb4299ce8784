// The best of many scores.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::kernels {

// The indices of the `count` largest, ascending; of equal ones the lower index. All of them where
// there are no more. NaN counts as less than any number.
std::vector<std::uint32_t> TopIndices(std::span<const double> scores, std::uint64_t count);

// All indices, from the largest score to the least; of equal ones the lower index first.
std::vector<std::uint32_t> ByFallingScore(std::span<const double> scores);

}  // namespace tessera::kernels
