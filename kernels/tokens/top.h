// Selects the largest of many scores.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::kernels {

// The indices of the `count` largest scores, ascending; ties go to the lower index. All indices if
// there are no more than `count`. NaN counts as less than any number.
std::vector<std::uint32_t> TopIndices(std::span<const double> scores, std::uint64_t count);

// All indices by falling score; ties go to the lower index.
std::vector<std::uint32_t> ByFallingScore(std::span<const double> scores);

}  // namespace tessera::kernels
