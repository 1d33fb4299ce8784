// How far the CUDA kernels' results may be from the exact ones: see kernels/format/error_bound.h.
#pragma once

#include "kernels/format/error_bound.h"

namespace tessera::kernels::cuda {

// Half precision: weights are rounded to the element type before they meet V, half a unit in the
// last place each (2^-9, 2^-12), and the sums of weights are not, which doubles it at worst. Tensor
// cores add products with less care than fp32 additions would: truncation instead of rounding, and
// a common exponent per step. The figures allow for that; they were never measured.
constexpr ErrorBound CudaErrorBound(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return {.base = 0x1p-8, .per_logit_mass = 0x1p-17};
    case ElementType::kFp16:
      return {.base = 0x1p-11, .per_logit_mass = 0x1p-17};
    case ElementType::kFp32:
      return {.base = 0x1p-18, .per_logit_mass = 0x1p-19};
  }
  return {};
}

}  // namespace tessera::kernels::cuda
