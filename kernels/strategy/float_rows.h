// Up to a tile of rows in fp32.
#pragma once

#include <cstdint>

#include "kernels/format/dense_tile.h"
#include "kernels/format/operations.h"
#include "kernels/strategy/moments.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kLargestHeadDim = 256;
static_assert(IsHeadDim(kLargestHeadDim) && !IsHeadDim(2 * kLargestHeadDim));

struct FloatRows {
  const float* row(std::uint32_t index) const { return elements + index * stride; }

  std::uint32_t stride = 0;
  alignas(64) float elements[kTileEntries * kLargestHeadDim];
};

// R x of at most 32 rows x; where the rotation is null the first `channels` elements as they are.
void Rotate(const RowSpan& rows, const StoredRotation& rotation, const Operations& operations,
            FloatRows& rotated);

// The rows as they are.
void Widen(const RowSpan& rows, const Operations& operations, FloatRows& wide);

// |x|^2 of `size` elements, a multiple of 8. No fp32 row is too large for it.
double Energy(const float* row, std::uint32_t size);

}  // namespace tessera::kernels
