// The rotations of a strategy.
#pragma once

#include <cstddef>

#include "kernels/format/element.h"

namespace tessera::kernels {

// Row c of `key` is what channel c of a rotated key is the product with: k' = R_k k, q' = R_k q and
// o = R_v^T o'. Null, both or neither: the identity; then no channel is cut.
struct RotationView {
  const std::byte* key = nullptr;    // [channels][head_dim] of `type`, 64-byte aligned
  const std::byte* value = nullptr;  // likewise
  ElementType type = ElementType::kBf16;
};

}  // namespace tessera::kernels
