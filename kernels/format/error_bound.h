// How far an implementation's attention may be from the exact one. The figures of every device are
// in kernels/README.md; the conformance suite holds implementations to them.
//
//   |output - exact| <= (base + per_logit_mass * M) * V + rounding of the output type
//   |lse - exact|    <= (base + per_logit_mass * M)     + rounding of |lse| to fp32
//
// M is the largest scale * sum_c |q_c * k_c| among the entries that the query sees (and the
// soft-cap where there is one), V the largest |v_c|.
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

}  // namespace tessera::kernels
