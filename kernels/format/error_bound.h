// How far an implementation's attention may be from the exact one. The figures of every device are
// in kernels/README.md; the conformance suite holds implementations to them.
//
//   |output - exact| <= (base + per_logit_mass * M) * V + rounding of the output type
//   |lse - exact|    <= (base + per_logit_mass * M)     + rounding of |lse| to fp32
//
// M is the largest scale * sum_c |q_c * k_c| + |ln weight| among the entries that the query sees
// (and the soft-cap where there is one), V the largest |v_c|.
//
// Over packed tiles the sum is of rotated channels, where |q'_c| counts at least |q| /
// sqrt(head_dim): each q'_c is itself a sum of head_dim products, and its rounding is of their size
// and not of its own. V is the largest |v_c| of the rows both as stored and as rotated back.
#pragma once

#include "kernels/format/element.h"

namespace tessera::kernels {

struct ErrorBound {
  double base = 0;
  double per_logit_mass = 0;

  constexpr double At(double logit_mass) const { return base + per_logit_mass * logit_mass; }
};

// Half a unit in the last place, relative; the absolute part is half the smallest subnormal.
struct Rounding {
  double relative = 0;
  double absolute = 0;
};

constexpr Rounding RoundingOf(ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return {.relative = 0x1p-8, .absolute = 0x1p-134};
    case ElementType::kFp16:
      return {.relative = 0x1p-11, .absolute = 0x1p-25};
    case ElementType::kFp32:
      return {.relative = 0x1p-24, .absolute = 0x1p-150};
  }
  return {};
}

// The CPU: products, logits, weights and sums in fp32 whatever the element type, so one bound.
inline constexpr ErrorBound kCpuErrorBound = {.base = 0x1p-22, .per_logit_mass = 0x1p-23};

// The scalar reference: double throughout, partial results stored as fp32.
inline constexpr ErrorBound kReferenceErrorBound = {.base = 0x1p-25, .per_logit_mass = 0x1p-26};

// Over packed tiles. The reference: rotated queries, partial results and rows rotated back are each
// rounded once to fp32, which is 2^-24 of a logit where one channel carries it.
inline constexpr ErrorBound kReferencePackedErrorBound = {.base = 0x1p-23,
                                                          .per_logit_mass = 0x1p-24};

// The CPU in fp32: two more sums of head_dim products, R_k q before and R_v^T o behind.
inline constexpr ErrorBound kCpuPackedErrorBound = {.base = 0x1p-20, .per_logit_mass = 0x1p-21};

// The CPU where it multiplies bf16 pairs (values that bf16 holds exactly: bf16, int8, fp8): rotated
// queries and weights are rounded to bf16, 2^-9 each in the mean and 2^-8 at worst.
inline constexpr ErrorBound kCpuBf16PackedErrorBound = {.base = 0x1p-7, .per_logit_mass = 0x1p-8};

// What observe adds to a key for a row whose share of it is a: |got - a| <= a * bound.At(M). A
// share's error is that of its logit and that of the largest one, so twice attention's.
inline constexpr ErrorBound kCpuObserveErrorBound = {.base = 0x1p-20, .per_logit_mass = 0x1p-22};
inline constexpr ErrorBound kReferenceObserveErrorBound = {.base = 0x1p-44,
                                                           .per_logit_mass = 0x1p-46};
// As logits, computed in fp32: as a share of sum_c |q_c k_c|.
inline constexpr double kObservedProductError = 0x1p-20;

}  // namespace tessera::kernels
