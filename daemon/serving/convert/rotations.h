// Whether a matrix that a request brings is a rotation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/format/element.h"

namespace tessera::serving {

// The most that an entry of R R^T - I may be. An orthonormal R that is rounded to bf16 stays below
// 2^-8 + 2^-18: each element is off by 2^-9 of itself at most, and rows have norm 1.
constexpr double OrthonormalBound(kernels::ElementType type) {
  return type == kernels::ElementType::kBf16 ? 0x1p-7 : 1e-4;
}

struct MatrixPlace {
  std::string_view name;  // "rotations.key"
  std::uint32_t layer;
  std::uint32_t kv_head;
};

// INVALID_ARGUMENT names the place, the row and what is wrong with it. `matrix` is
// [channels][head_dim] of bf16 or fp32.
absl::Status CheckRotation(const std::byte* matrix, kernels::ElementType type,
                           std::uint32_t channels, std::uint32_t head_dim,
                           const MatrixPlace& place);

}  // namespace tessera::serving
