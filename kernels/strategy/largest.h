// The largest of a few numbers, without sorting them.
#pragma once

#include <cstdint>

namespace tessera::kernels {

// None is below 0 or NaN, so their order is that of their bits.
struct Magnitudes {
  const std::int32_t* bits;  // of fp32 numbers
  std::uint32_t size;
};

// The `count` largest are those above `bits` and `equal` of those that equal it.
struct Cutoff {
  std::int32_t bits;
  std::uint32_t equal;
};
Cutoff FindCutoff(const Magnitudes& numbers, std::uint32_t count);

double SumOfLargest(const Magnitudes& numbers, std::uint32_t count);

// The indices of the `count` largest in rising order; of equal ones the lower. To `indices`.
void IndicesOfLargest(const Magnitudes& numbers, std::uint32_t count, std::uint16_t* indices);

}  // namespace tessera::kernels
