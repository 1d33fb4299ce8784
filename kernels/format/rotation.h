// The rotations of a strategy.
#pragma once

#include <cstddef>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// Row c of `key` is what channel c of a rotated key is the product with: k' = R_k k, q' = R_k q and
// o = R_v^T o'. Null: the identity; then no channel of that side is cut.
struct RotationView {
  const std::byte* key = nullptr;    // [its channels][head_dim] of `type`, 64-byte aligned
  const std::byte* value = nullptr;  // likewise
  ElementType type = ElementType::kBf16;
};

// Whether a side that lacks channels has a rotation to say which. Only of shapes that are served.
constexpr bool CutsAreExplained(const TileShape& shape, const RotationView& rotation) {
  return (rotation.key != nullptr || shape.key.channels == shape.head_dim) &&
         (rotation.value != nullptr || shape.value.channels == shape.head_dim);
}

}  // namespace tessera::kernels
