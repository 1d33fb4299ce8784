// How far the CUDA kernels' results may be from the exact ones: see kernels/format/error_bound.h.
#pragma once

#include "kernels/format/error_bound.h"
#include "kernels/format/value_type.h"

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

// Packed segments, in the space that their rows are stored in: M is the largest scale * sum_c |q'_c
// * k'_c| there, V the largest magnitude that an entry's value has anywhere on its way back. The
// rotated query is rounded to the operand's type, half a unit in the last place per channel (2^-8
// of its magnitude at worst, 2^-11), and moves every logit by up to that much of M; the softmax
// doubles it. Stored values and scales are exact. Weights are rounded as above, after V's scale.
// The bound of a lane that mixes strategies is the largest of its segments'.
constexpr ErrorBound PackedErrorBound(ValueType values) {
  if (values == ValueType::kFp16) return {.base = 0x1p-10, .per_logit_mass = 0x1p-10};
  return {.base = 0x1p-8, .per_logit_mass = 0x1p-7};
}

// What observe adds to a key, as kCpuObserveErrorBound: fp32 throughout, and the sum of weights
// rescaled with every key that a lane adds. Derived.
inline constexpr ErrorBound kObserveErrorBound = {.base = 0x1p-18, .per_logit_mass = 0x1p-21};

}  // namespace tessera::kernels::cuda
