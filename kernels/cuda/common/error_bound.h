// Error bounds of the CUDA kernels against exact results. kernels/format/error_bound.h defines the
// terms.
#pragma once

#include "kernels/format/error_bound.h"
#include "kernels/format/value_type.h"

namespace tessera::kernels::cuda {

// Dense bf16 and fp16. Weights are rounded to the element type before they multiply V, by half a
// unit in the last place (2^-9, 2^-12). The sums of weights are not rounded, which at worst doubles
// the error. Tensor cores add less precisely than fp32 additions: they truncate instead of rounding
// and share one exponent per step. The figures allow for that; they are derived, not measured.
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

// Packed segments, in the rotated space that their rows are stored in. M is the largest scale *
// sum_c |q'_c * k'_c| there. V is the largest magnitude that an entry's value reaches anywhere
// while it is rotated back. The rotated query is rounded to the operand type, by half a unit in the
// last place per channel (at worst 2^-8 of its magnitude for bf16, 2^-11 for fp16). That moves
// every logit by up to the same share of M, and the softmax doubles it. Stored values and scales
// are exact. Weights are rounded as above, after V's scale is applied. A lane that mixes strategies
// has the largest bound of its segments.
constexpr ErrorBound PackedErrorBound(ValueType values) {
  if (values == ValueType::kFp16) return {.base = 0x1p-10, .per_logit_mass = 0x1p-10};
  return {.base = 0x1p-8, .per_logit_mass = 0x1p-7};
}

// Planes: the query is rounded to int8 codes as everywhere (kReferencePlanesErrorBound). Weights
// times scales are rounded to bf16; fp32 sums of operands up to 2304 a channel add 2^-14 of a step.
inline constexpr ErrorBound kPlanesErrorBound = {.base = 0x1p-8, .per_logit_mass = 0x1p-6};

// Error of the sums that observe adds to a key, like kCpuObserveErrorBound: all arithmetic is fp32,
// and the sum of weights is rescaled with every key that a lane adds. Derived, not measured.
inline constexpr ErrorBound kObserveErrorBound = {.base = 0x1p-18, .per_logit_mass = 0x1p-21};

}  // namespace tessera::kernels::cuda
