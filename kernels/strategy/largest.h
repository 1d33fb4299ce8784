// Finds the largest of a few numbers without sorting.
#pragma once

#include <cstdint>

namespace tessera::kernels {

// fp32 numbers as bits. None is negative or NaN, so their order is that of their bits.
struct Magnitudes {
  const std::int32_t* bits;  // of fp32 numbers
  std::uint32_t size;
};

// The `count` largest numbers are those above `bits` plus `equal` of those equal to it.
struct Cutoff {
  std::int32_t bits;
  std::uint32_t equal;
};
Cutoff FindCutoff(const Magnitudes& numbers, std::uint32_t count);

double SumOfLargest(const Magnitudes& numbers, std::uint32_t count);

// Writes the indices of the `count` largest in rising order; ties go to the lower index.
void IndicesOfLargest(const Magnitudes& numbers, std::uint32_t count, std::uint16_t* indices);

}  // namespace tessera::kernels
