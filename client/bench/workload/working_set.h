// Lanes of tiles for kernel benchmarks, in a shared mapping like a pool's, much larger than the
// last-level cache. Tiles of a lane are consecutive, as after a prompt.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/step/thread_team.h"
#include "daemon/platform/memfd.h"
#include "kernels/format/lane_view.h"

namespace tessera::cli::bench {

// Length of a segment, as in prompts.
inline constexpr std::uint32_t kSegmentEntries = 65536;

// A packed shape with 25 % of the channels and mean keys per block.
kernels::TileShape PackedTile(std::uint32_t head_dim, kernels::TileFormat format,
                              std::uint32_t group, std::uint8_t block = 8);

struct LaneSetShape {
  std::uint32_t lanes = 8;
  std::uint32_t tokens = 0;  // per lane, a multiple of 32
  kernels::TileShape tile;
};

class LaneSet {
 public:
  // Dense bf16 rows of normally distributed numbers, without block summaries.
  static absl::StatusOr<std::unique_ptr<LaneSet>> Random(const LaneSetShape& shape,
                                                         client::ThreadTeam& team);
  // The rows of a dense set, encoded. All segments of a packed set share one rotation.
  static absl::StatusOr<std::unique_ptr<LaneSet>> Encoded(const LaneSet& dense,
                                                          const kernels::TileShape& tile,
                                                          client::ThreadTeam& team);

  const LaneSetShape& shape() const { return shape_; }
  const kernels::LaneView& lane(std::uint32_t index) const { return lanes_[index]; }
  std::uint64_t tile_bytes() const { return tile_bytes_; }
  std::uint64_t bytes() const { return range_.bytes(); }
  const std::byte* data() const { return range_.data(); }
  // Bytes per token and lane: tiles with summaries, and the same plus rotations.
  double TileBytesPerToken() const;
  double BytesPerToken() const;
  // The tile with this number, counted over all lanes.
  const std::byte* Tile(std::uint64_t number) const { return range_.data() + offsets_[number]; }

 private:
  LaneSet() = default;
  static absl::StatusOr<std::unique_ptr<LaneSet>> Allocate(const LaneSetShape& shape);
  void Cut();
  void FillRandom(std::uint32_t lane);

  LaneSetShape shape_;
  // Layout of the mapping: all tiles, each rounded up to 64 bytes, then their summaries.
  std::uint64_t tile_bytes_ = 0;
  std::uint64_t summary_bytes_ = 0;
  Memfd memory_;
  AddressRange range_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> summary_offsets_;
  std::vector<std::byte> rotations_;
  kernels::RotationView rotation_;
  std::vector<kernels::SegmentView> segments_;
  std::vector<kernels::LaneView> lanes_;
};

// R_k followed by R_v, as a strategy stores them: random orthonormal rows in bf16. For planes, a
// whole book.
std::vector<std::byte> RandomRotations(const kernels::TileShape& tile);

// Encodes tiles of one shape on one thread.
class TileEncoder {
 public:
  TileEncoder(const kernels::TileShape& shape, const kernels::RotationView& rotation);
  // Encodes a dense bf16 tile of 32 entries. False if a value is not finite.
  bool Encode(const std::byte* dense, std::byte* tile, std::byte* summaries) const;

 private:
  kernels::TileShape shape_;
  kernels::TileLayout layout_;
  std::vector<std::byte> memory_;
  std::byte* prepared_;
};

}  // namespace tessera::cli::bench
