// Keys on their way to other rotary positions: a rotation by the difference, which is valid as long
// as frequencies do not depend on the length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/cache/model/model.h"
#include "kernels/format/dense_tile.h"

namespace tessera::compaction {

class KeyTurner {
 public:
  // INVALID_ARGUMENT where the model's positions cannot be moved, with the reason.
  static absl::Status WhyNot(const cache::ModelSpec& spec);

  KeyTurner(const cache::ModelSpec& spec, const kernels::DenseTile& tile);

  // The key of a token at position p becomes that of one at p + by.
  void Turn(std::byte* key, std::int64_t by) const;
  // Likewise, elsewhere: head_dim elements.
  void TurnInto(const std::byte* key, std::int64_t by, std::span<double> row) const;

 private:
  const kernels::DenseTile tile_;
  const bool interleaved_;
  std::vector<double> frequencies_;  // of each pair, per position
};

}  // namespace tessera::compaction
