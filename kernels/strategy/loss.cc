#include "kernels/strategy/loss.h"

#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/keeping.h"
#include "kernels/strategy/sample.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {
namespace {

double LossUnderOneSide(const RowSpan& rows, const Keeping& keeping, const StoredRotation& rotation,
                        const Operations& operations) {
  return MeanLosses(rows, TilesOf(rows.count), rotation, {&keeping, 1}, operations)[0];
}

// `stored` are the rows as a tile stores them, `stride` floats apart.
double LossOfStored(const RowSpan& raw, const float* stored, std::uint32_t stride,
                    const Operations& operations) {
  FloatRows wide;
  Widen(raw, operations, wide);
  double loss = 0;
  for (std::uint32_t r = 0; r < raw.count; ++r) {
    const double energy = Energy(wide.row(r), raw.head_dim);
    if (energy > 0) loss += 1 - Energy(stored + r * stride, stride) / energy;
  }
  return loss / static_cast<double>(raw.count);
}

}  // namespace

Loss LossUnder(const LaneRows& rows, const TileShape& shape, const RotationView& rotation,
               const Operations& operations) {
  const auto side = [&](const RowSpan& span, const RowShape& row, const std::byte* matrix) {
    return LossUnderOneSide(span, {.kept = row.kept, .group = shape.group},
                            {.matrix = matrix, .type = rotation.type, .channels = row.channels},
                            operations);
  };
  return {.key = side(rows.keys, shape.key, rotation.key),
          .value = side(rows.values, shape.value, rotation.value)};
}

Loss LossOfTile(const LaneRows& raw, const TileShape& shape, const std::byte* tile,
                const Operations& operations) {
  if (raw.keys.count == 0) return {};
  FloatRows keys;
  FloatRows values;
  const std::uint32_t padded = PaddedChannels(shape);
  operations.decode({.tile = tile,
                     .shape = shape,
                     .layout = LayoutOf(shape),
                     .rows = static_cast<std::uint32_t>(raw.keys.count),
                     .padded_channels = padded,
                     .keys = keys.elements,
                     .values = values.elements});
  return {.key = LossOfStored(raw.keys, keys.elements, padded, operations),
          .value = LossOfStored(raw.values, values.elements, padded, operations)};
}

}  // namespace tessera::kernels
