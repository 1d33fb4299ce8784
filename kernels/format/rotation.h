// The rotations of a strategy.
#pragma once

#include <cstddef>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// k' = R_k k, q' = R_k q and o = R_v^T o'; row c of `key` produces channel c of a rotated key. Null
// means the identity, and then no channel of that side may be truncated.
struct RotationView {
  const std::byte* key = nullptr;    // [key channels][head_dim] of `type`, 64-byte aligned
  const std::byte* value = nullptr;  // likewise for V
  ElementType type = ElementType::kBf16;
};

// Whether every side with truncated channels has a rotation. Requires a supported shape.
constexpr bool HasRequiredRotations(const TileShape& shape, const RotationView& rotation) {
  return (rotation.key != nullptr || shape.key.channels == shape.head_dim) &&
         (rotation.value != nullptr || shape.value.channels == shape.head_dim);
}

}  // namespace tessera::kernels
