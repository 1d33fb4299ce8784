// Decodes rows of any form as attention sees them: rotated back, with the means of planes added and
// zeros for what packing dropped. Works on every device, because it copies tiles to the daemon's
// memory first.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/segment/lane.h"
#include "kernels/format/operations.h"
#include "kernels/strategy/aligned_bytes.h"
#include "kernels/strategy/float_rows.h"

namespace tessera::cache {

// Used by one thread at a time. Keeps the rotations of the last segment, so decode the tiles of a
// segment one after another.
class RowDecoder {
 public:
  explicit RowDecoder(device::Device& device);

  // Decodes the first `rows` rows of a tile of `segment`, which must be in the pool. Writes
  // [rows][head_dim] each.
  absl::Status Decode(const Segment& segment, const std::byte* tile, std::uint32_t rows,
                      float* keys, float* values);

 private:
  absl::Status Prepare(const Segment& segment);
  absl::Status LoadRotations(const Segment& segment);
  // Rotates rows of one side back, and adds the mean. Null: the identity, zeros.
  void TurnBack(const std::byte* rotation, const std::byte* mean, const kernels::RowShape& side,
                const kernels::FloatRows& rows, std::uint32_t count, float* output);

  device::Device& device_;
  const kernels::Operations& operations_;
  const Segment* prepared_ = nullptr;
  kernels::TileShape shape_;
  kernels::TileLayout layout_{};
  std::uint32_t padded_ = 0;
  kernels::RotationView rotation_;
  kernels::AlignedBytes matrices_;  // host copy of the rotations
  kernels::AlignedBytes tile_;      // host copy of a tile
  kernels::FloatRows keys_;
  kernels::FloatRows values_;
  kernels::FloatRows turned_;
};

// Widens rows of `type` to fp32, and back. `count` elements.
void ToFloats(const std::byte* from, kernels::ElementType type, std::size_t count, float* to);
void FromFloats(const float* from, kernels::ElementType type, std::size_t count, std::byte* to);

}  // namespace tessera::cache
