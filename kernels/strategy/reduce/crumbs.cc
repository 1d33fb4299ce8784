#include "kernels/strategy/reduce/crumbs.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/element.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::kernels {
namespace {

constexpr std::uint16_t kLargestBf16 = 0x7f7f;

// A scale times four. A scale that would become infinite is of rows that nothing can represent: it
// becomes the largest.
std::uint16_t FourTimes(std::uint16_t scale) {
  constexpr std::uint16_t kTwoExponents = 2 << 7;
  if (scale == 0) return 0;
  return std::min<std::uint16_t>(scale + kTwoExponents, kLargestBf16);
}

void DropCrumbsOfQuad(const ReduceJob& job, const QuadLayout& from, const QuadLayout& to,
                      std::size_t quad) {
  const std::byte* const was = job.tile + quad * from.bytes;
  std::byte* const is = job.thinned + quad * to.bytes;
  const PlaneWidths& widths = job.from.key_planes;
  const PlaneWidths& shorter = job.to.key_planes;
  const std::uint32_t channels = job.from.head_dim / widths.planes();
  for (std::uint32_t p = 0; p < widths.planes(); ++p) {
    // The upper bits of 6-bit codes come first.
    std::memcpy(is + to.key[p], was + from.key[p], PlaneBytes(channels, shorter.width(p)));
    for (std::uint32_t row = 0; row < kQuadRows; ++row) {
      const std::size_t at = (std::size_t{p} * kQuadRows + row) * sizeof(std::uint16_t);
      std::uint16_t scale;
      std::memcpy(&scale, was + from.key_scales + at, sizeof scale);
      if (shorter.width(p) != widths.width(p)) scale = FourTimes(scale);
      std::memcpy(is + to.key_scales + at, &scale, sizeof scale);
    }
  }
  const PlaneWidths& values = job.from.value_planes;
  const std::uint32_t of_value = job.from.head_dim / values.planes();
  for (std::uint32_t p = 0; p < values.planes(); ++p) {
    std::memcpy(is + to.value[p], was + from.value[p], PlaneBytes(of_value, values.width(p)));
  }
  std::memcpy(is + to.value_scales, was + from.value_scales,
              std::size_t{values.planes()} * kQuadRows * sizeof(std::uint16_t));
}

// The keys of a tile as floats, [row][head_dim].
AlignedBytes KeysOf(const TileShape& shape, const std::byte* tile, std::uint32_t rows,
                    const Operations& operations) {
  const std::size_t side = std::size_t{kTileEntries} * shape.head_dim;
  AlignedBytes decoded(2 * side * sizeof(float));
  auto* const keys = reinterpret_cast<float*>(decoded.data());
  operations.decode({.tile = tile,
                     .shape = shape,
                     .layout = LayoutOf(shape),
                     .rows = rows,
                     .padded_channels = shape.head_dim,
                     .keys = keys,
                     .values = keys + side});
  return decoded;
}

}  // namespace

std::optional<TileShape> ShapeWithoutCrumbs(const TileShape& shape) {
  if (!shape.planes()) return std::nullopt;
  TileShape shorter = shape;
  shorter.key_planes = WithoutCrumbs(shape.key_planes);
  if (LayoutOf(shorter).bytes >= LayoutOf(shape).bytes) return std::nullopt;
  return shorter;
}

Stays DropCrumbs(const ReduceJob& job, const Operations& operations) {
  const TileLayout from = LayoutOf(job.from);
  const TileLayout to = LayoutOf(job.to);
  std::memset(job.thinned, 0, to.bytes);
  for (std::size_t quad = 0; quad < kTileQuads; ++quad) {
    DropCrumbsOfQuad(job, from.quad, to.quad, quad);
  }
  constexpr std::size_t kWord = 4;  // a weight, or a position
  if (job.from.weights) {
    std::memcpy(job.thinned + to.weights, job.tile + from.weights, kTileEntries * kWord);
  }
  if (job.from.positions) {
    std::memcpy(job.thinned + to.positions, job.tile + from.positions, kTileEntries * kWord);
  }
  if (from.summary_bytes > 0) {
    std::memcpy(job.thinned_summaries, job.summaries, from.summary_bytes);
  }
  const AlignedBytes was = KeysOf(job.from, job.tile, job.rows, operations);
  const AlignedBytes is = KeysOf(job.to, job.thinned, job.rows, operations);
  const auto* const before = reinterpret_cast<const float*>(was.data());
  const auto* const after = reinterpret_cast<const float*>(is.data());
  double energy = 0;
  double changed = 0;
  for (std::size_t i = 0; i < std::size_t{job.rows} * job.from.head_dim; ++i) {
    const double change = double{after[i]} - before[i];
    energy += double{before[i]} * before[i];
    changed += change * change;
  }
  return {.key = energy > 0 ? 1 - changed / energy : 1, .value = 1};
}

}  // namespace tessera::kernels
