// Re-rotates keys to other rotary positions. This is a rotation by the difference of positions,
// valid only if the model's RoPE frequencies do not depend on the text length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/cache/model/model.h"
#include "kernels/format/dense_tile.h"

namespace tessera::compaction {

// Immutable, so it may be used by any thread.
class RopeShift {
 public:
  // INVALID_ARGUMENT with the reason if the keys of some layer of the model cannot be moved.
  static absl::Status WhyNot(const cache::ModelSpec& spec);

  // `rope` is that of the layer whose keys are moved.
  RopeShift(const cache::RopeSpec& rope, const kernels::DenseTile& tile);

  // Turns the key of a token at position p into the key of the same token at p + by.
  void Turn(std::byte* key, std::int64_t by) const;
  // The same, but writes the head_dim elements to `row`.
  void ShiftInto(const std::byte* key, std::int64_t by, std::span<double> row) const;

 private:
  const kernels::DenseTile tile_;
  const bool interleaved_;
  std::vector<double> frequencies_;  // radians per position, one for each pair of channels
};

}  // namespace tessera::compaction
