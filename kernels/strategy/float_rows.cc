#include "kernels/strategy/float_rows.h"

#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

void Rotate(const RowSpan& rows, const StoredRotation& rotation, const Operations& operations,
            FloatRows& rotated) {
  const std::byte* pointers[kTileEntries];
  for (std::uint32_t r = 0; r < rows.count; ++r) pointers[r] = rows.row(r);
  rotated.stride = (rotation.channels + kChannelPadding - 1) / kChannelPadding * kChannelPadding;
  operations.rotate({.rotation = rotation.matrix,
                     .rotation_type = rotation.type,
                     .channels = rotation.channels,
                     .head_dim = rows.head_dim,
                     .rows = pointers,
                     .row_type = rows.type,
                     .row_count = static_cast<std::uint32_t>(rows.count),
                     .output = rotated.elements,
                     .padded_channels = rotated.stride});
}

void Widen(const RowSpan& rows, const Operations& operations, FloatRows& wide) {
  Rotate(rows, {.channels = rows.head_dim}, operations, wide);
}

double Energy(const float* row, std::uint32_t size) {
  // Several sums let the compiler vectorize; they are added in a fixed order.
  constexpr std::uint32_t kSums = 8;
  double sums[kSums] = {};
  for (std::uint32_t i = 0; i < size; i += kSums) {
    for (std::uint32_t j = 0; j < kSums; ++j) {
      const double element = row[i + j];
      sums[j] += element * element;
    }
  }
  double energy = 0;
  for (const double sum : sums) energy += sum;
  return energy;
}

}  // namespace tessera::kernels
