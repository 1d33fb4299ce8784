// The maximum distance between an implementation's attention and the exact result.
// kernels/README.md lists the figures of every device; the conformance suite checks them.
//
//   |output - exact| <= (base + per_logit_mass * M) * V + rounding of the output type
//   |lse - exact|    <= (base + per_logit_mass * M)     + rounding of |lse| to fp32
//
// M is the largest scale * sum_c |q_c * k_c| + |ln weight| among the entries visible to the query,
// plus the soft-cap if the layer has one. V is the largest |v_c|.
//
// Over packed tiles the sum runs over rotated channels, and each |q'_c| counts as at least |q| /
// sqrt(head_dim): q'_c is a sum of head_dim products, so its rounding error scales with those
// products, not with q'_c. V is the maximum over the rows as stored and as rotated back.
#pragma once

#include "kernels/format/element.h"

namespace tessera::kernels {

struct ErrorBound {
  double base = 0;
  double per_logit_mass = 0;

  constexpr double At(double logit_mass) const { return base + per_logit_mass * logit_mass; }
};

// Half a unit in the last place (relative), and half the smallest subnormal (absolute).
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

// CPU, dense tiles. Products, logits, weights and sums are fp32 for every element type, so one
// bound covers all.
inline constexpr ErrorBound kCpuErrorBound = {.base = 0x1p-22, .per_logit_mass = 0x1p-23};

// The scalar reference: double throughout, partial results stored as fp32.
inline constexpr ErrorBound kReferenceErrorBound = {.base = 0x1p-25, .per_logit_mass = 0x1p-26};

// The reference over packed tiles. Rotated queries, partial results and rotated-back rows are each
// rounded once to fp32, which is 2^-24 of a logit that comes from a single channel.
inline constexpr ErrorBound kReferencePackedErrorBound = {.base = 0x1p-23,
                                                          .per_logit_mass = 0x1p-24};

// CPU in fp32 over packed tiles: two more sums of head_dim products, R_k q and R_v^T o.
inline constexpr ErrorBound kCpuPackedErrorBound = {.base = 0x1p-20, .per_logit_mass = 0x1p-21};

// CPU with bf16 pair products, for values that bf16 holds exactly (bf16, int8, fp8). Rotated
// queries and weights are rounded to bf16: 2^-9 each on average and 2^-8 at worst.
inline constexpr ErrorBound kCpuBf16PackedErrorBound = {.base = 0x1p-7, .per_logit_mass = 0x1p-8};

// Over planes, each |q'_c| counts as the largest of its plane and M includes scale * sum |q_c
// mu_c|. Queries are rounded to int8 codes, by at most 1/254 of the plane's largest channel; an
// output moves by up to twice the error of its logits.
inline constexpr ErrorBound kReferencePlanesErrorBound = {.base = 0x1p-23,
                                                          .per_logit_mass = 0x1p-6};
// CPU over planes: in addition, weights times scales are rounded to 8 bits of the largest in eight
// quads, by at most 1/510 of it for each of 32 rows. The typical error is 2^-9.
inline constexpr ErrorBound kCpuPlanesErrorBound = {.base = 0x1p-4, .per_logit_mass = 0x1p-6};

// `observe`: if a row's share of a key is a, then |result - a| <= a * bound.At(M). The error has
// two sources, the key's logit and the largest logit, so it is twice that of attention.
inline constexpr ErrorBound kCpuObserveErrorBound = {.base = 0x1p-20, .per_logit_mass = 0x1p-22};
inline constexpr ErrorBound kReferenceObserveErrorBound = {.base = 0x1p-44,
                                                           .per_logit_mass = 0x1p-46};
// `observe` returning products, computed in fp32: relative to sum_c |q_c k_c|.
inline constexpr double kObservedProductError = 0x1p-20;

}  // namespace tessera::kernels
