// Up to one tile of rows in fp32.
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

// Computes R x for at most 32 rows x. If the rotation is null, copies the first `channels`
// elements.
void Rotate(const RowSpan& rows, const StoredRotation& rotation, const Operations& operations,
            FloatRows& rotated);

// Converts rows to fp32 without rotating them.
void Widen(const RowSpan& rows, const Operations& operations, FloatRows& wide);

// |x|^2 of `size` elements, a multiple of 8. Does not overflow for any finite fp32 row.
double Energy(const float* row, std::uint32_t size);

}  // namespace tessera::kernels
