// Random shapes, books and tiles of the planes format.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/reference/planes.h"
#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {

inline constexpr std::uint8_t kPlaneWidths[] = {2, 4, 6, 8};

inline PlaneWidths AnyWidths(TestRandom& random) {
  const std::uint8_t second = random.OneIn(3) ? std::uint8_t{0} : random.Pick(kPlaneWidths);
  return {random.Pick(kPlaneWidths), second};
}

inline TileShape AnyPlanes(TestRandom& random) {
  TileShape shape = PlanesShape(random.Pick(kHeadDims), AnyWidths(random), AnyWidths(random));
  shape.weights = random.OneIn(2);
  shape.positions = random.OneIn(2);
  if (shape.key_planes.planes() == 2 && random.OneIn(2)) shape = WithSigns(shape);
  return shape;
}

// Random orthogonal matrices, and means of a few units.
class TestBook {
 public:
  TestBook(const TileShape& shape, TestRandom& random)
      : rotations_(shape, ElementType::kBf16, random), means_(4 * shape.head_dim) {
    for (std::uint32_t d = 0; d < 2 * shape.head_dim; ++d) {
      const std::uint16_t bits = FloatToBf16(3 * NormalNumber(random));
      std::memcpy(means_.data() + 2 * d, &bits, sizeof(bits));
    }
    view_ = rotations_.view();
    view_.key_mean = means_.data();
    view_.value_mean = means_.data() + 2 * shape.head_dim;
  }
  const RotationView& view() const { return view_; }

 private:
  Rotations rotations_;
  Buffer means_;
  RotationView view_;
};

// Random codes, positive scales and signs in the live rows; ones in the others.
inline std::vector<std::byte> AnyTile(const TileShape& shape, std::uint32_t rows,
                                      TestRandom& random) {
  const TileLayout layout = LayoutOf(shape);
  std::vector<std::byte> tile(layout.bytes + layout.summary_bytes);
  for (std::byte& byte : tile) byte = std::byte(random.Below(256));
  for (const SidePlanes& side : {KeyPlanes(shape, layout), ValuePlanes(shape, layout)}) {
    for (std::uint32_t r = 0; r < kTileEntries; ++r) {
      for (std::uint32_t p = 0; p < side.planes; ++p) {
        const float scale = std::exp(NormalNumber(random)) / (1u << (side.width[p] - 1));
        WriteScale(side, tile.data(), r, p,
                   r < rows ? scale : std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
  std::uint32_t position = 0;
  for (std::uint32_t r = 0; r < kTileEntries; ++r) {
    position += 1 + static_cast<std::uint32_t>(random.Below(3));
    const float weight = random.OneIn(9) ? 0 : 1 + static_cast<float>(random.Below(5));
    if (shape.weights) std::memcpy(tile.data() + layout.weights + 4 * r, &weight, 4);
    if (shape.positions) std::memcpy(tile.data() + layout.positions + 4 * r, &position, 4);
  }
  return tile;
}

// Planes and signs as separate calls.
class PlanesSuite : public PartConformance {};

// The subjects of this binary: a file of subjects defines it.
std::vector<PackSubjectPtr> PlanesSubjects();

}  // namespace tessera::kernels
