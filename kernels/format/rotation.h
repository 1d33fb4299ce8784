// The rotations of a strategy.
#pragma once

#include <cstddef>

#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// k' = R_k k, q' = R_k q and o = R_v^T o'; row c of `key` produces channel c of a rotated key. Null
// means the identity, and then no channel of that side may be truncated.
//
// Books of planes have means: k' = R_k (k - mu_k), so q.k = q'.k' + q.mu_k; likewise for V. A sign
// index beside dense tiles uses R_k and mu_k.
struct RotationView {
  const std::byte* key = nullptr;    // [key channels][head_dim] of `type`, 64-byte aligned
  const std::byte* value = nullptr;  // likewise for V
  ElementType type = ElementType::kBf16;
  const std::byte* key_mean = nullptr;    // bf16 [head_dim], 64-byte aligned; null: zeros
  const std::byte* value_mean = nullptr;  // likewise for V

  bool operator==(const RotationView&) const = default;
};

// The book stored at `base`, 64-byte aligned: see BookLayout.
constexpr RotationView BookAt(const std::byte* base, std::uint32_t head_dim) {
  const BookLayout layout = BookLayoutOf(head_dim);
  return {.key = base + layout.key_rotation,
          .value = base + layout.value_rotation,
          .type = ElementType::kBf16,
          .key_mean = base + layout.key_mean,
          .value_mean = base + layout.value_mean};
}

// Whether every side with truncated channels has a rotation, planes a whole book, and a sign index
// the keys' side of a book. Requires a supported shape.
constexpr bool HasRequiredRotations(const TileShape& shape, const RotationView& rotation) {
  const bool bf16 = rotation.type == ElementType::kBf16;
  const bool key_book = bf16 && rotation.key != nullptr && rotation.key_mean != nullptr;
  if (shape.planes()) {
    return key_book && rotation.value != nullptr && rotation.value_mean != nullptr;
  }
  if (shape.summary == Summary::kSigns) return key_book;
  return (rotation.key != nullptr || shape.key.channels == shape.head_dim) &&
         (rotation.value != nullptr || shape.value.channels == shape.head_dim);
}

}  // namespace tessera::kernels
