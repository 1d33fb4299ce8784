// What forms of storage leave of a lane's rows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/measure/attention_judge.h"
#include "kernels/format/operations.h"
#include "kernels/strategy/strategy.h"

namespace tessera::cli::bench {

// Of the implementation that attention would use.
const kernels::Operations& BenchOperations();

struct KeptRows {
  FloatLane lane;    // turned back, channels that were dropped are 0 before it
  double bytes = 0;  // of all rows, and of the rotations
};

// Encoded into tiles and decoded, as a packed segment holds them. INTERNAL where a row cannot be.
absl::StatusOr<KeptRows> ThroughTiles(const kernels::LaneRows& rows,
                                      const kernels::TileShape& shape,
                                      const kernels::RotationView& rotation);

// No form of the product: the same channels in every row, in bf16, those with the largest second
// moments. `rotation` has all channels; null: raw ones.
KeptRows ThroughMask(const kernels::LaneRows& rows, std::uint32_t channels,
                     const kernels::RotationView& rotation);
// The most channels that such masks can have within so many bytes; at least one.
std::uint32_t ChannelsWithin(double bytes, const kernels::LaneRows& rows, bool rotated);

// The strategy of one share and group, whatever it loses; no blocks.
kernels::StrategyOptions FixedOptions(double share, std::uint32_t group);
kernels::Strategy StrategyFor(const kernels::LaneRows& rows,
                              const kernels::StrategyOptions& options);

// Rows of a lane in memory of their own: all its even tiles, or all its odd ones.
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
