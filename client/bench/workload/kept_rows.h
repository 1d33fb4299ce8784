// A lane's rows after encoding and decoding in various storage formats.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/measure/attention_judge.h"
#include "kernels/format/operations.h"
#include "kernels/strategy/strategy.h"

namespace tessera::cli::bench {

// The operations of the implementation that attention would use.
const kernels::Operations& BenchOperations();

struct KeptRows {
  FloatLane lane;    // rotated back, with dropped channels set to 0 first
  double bytes = 0;  // of all rows and the rotations
};

// Encodes rows into tiles of a packed segment and decodes them. INTERNAL if a row cannot be
// encoded.
absl::StatusOr<KeptRows> ThroughTiles(const kernels::LaneRows& rows,
                                      const kernels::TileShape& shape,
                                      const kernels::RotationView& rotation);

// For comparison only: keeps the same channels in every row, those with the largest second moments,
// in bf16. `rotation` has all channels; null: raw channels.
KeptRows ThroughMask(const kernels::LaneRows& rows, std::uint32_t channels,
                     const kernels::RotationView& rotation);
// The most channels of such a mask that fit `bytes`; at least one.
std::uint32_t ChannelsWithin(double bytes, const kernels::LaneRows& rows, bool rotated);

// Options for one share of channels and one group, at any loss, without block summaries.
kernels::StrategyOptions FixedOptions(double share, std::uint32_t group);
kernels::Strategy StrategyFor(const kernels::LaneRows& rows,
                              const kernels::StrategyOptions& options);

// A copy of a lane's even tiles, or of its odd ones.
class EveryOtherTile {
 public:
  EveryOtherTile(const kernels::LaneRows& rows, bool odd);
  kernels::LaneRows rows() const;
  void Append(const EveryOtherTile& more);

 private:
  kernels::RowSpan like_;
  std::vector<std::byte> keys_;
  std::vector<std::byte> values_;
};

}  // namespace tessera::cli::bench
