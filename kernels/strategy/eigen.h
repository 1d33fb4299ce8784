// Eigendecomposition of second moments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/strategy/moments.h"

namespace tessera::kernels {

// Rows are unit eigenvectors by falling eigenvalue. The component of largest magnitude of each (the
// first if tied) is positive. If all moments are zero: the identity.
struct Eigenbasis {
  std::uint32_t head_dim = 0;
  std::vector<double> vectors;  // [head_dim][head_dim]
  std::vector<double> values;   // [head_dim], falling, none negative

  const double* vector(std::uint32_t index) const {
    return vectors.data() + std::size_t{index} * head_dim;
  }
};
Eigenbasis Decompose(const Moments& moments);

}  // namespace tessera::kernels
