// Checks that a matrix in a request is a rotation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/format/element.h"

namespace tessera::serving {

// The largest allowed entry of R R^T - I. An orthonormal R rounded to bf16 is below 2^-8 + 2^-18:
// each element has a relative error of at most 2^-9, and rows have norm 1.
constexpr double OrthonormalBound(kernels::ElementType type) {
  return type == kernels::ElementType::kBf16 ? 0x1p-7 : 1e-4;
}

// Where a matrix is in the request, for messages.
struct MatrixPlace {
  std::string_view name;  // "rotations.key"
  std::uint32_t layer;
  std::uint32_t kv_head;
};

// `matrix` is [channels][head_dim] of bf16 or fp32. INVALID_ARGUMENT names the place, the row and
// the reason.
absl::Status CheckRotation(const std::byte* matrix, kernels::ElementType type,
                           std::uint32_t channels, std::uint32_t head_dim,
                           const MatrixPlace& place);

}  // namespace tessera::serving
