// `Tiles` is a list of tiles of one shape in the pool, with their block summaries. Summaries are
// stored apart from the tiles. Those of tiles allocated together are contiguous, so that a
// selection reads them as one stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/device/device.h"
#include "daemon/pool/pool.h"
#include "kernels/format/tile_shape.h"

namespace tessera::cache {

class Tiles {
 public:
  Tiles() = default;
  // Allocates all tiles or none.
  static absl::StatusOr<Tiles> Allocate(pool::Pool& pool, const kernels::TileShape& shape,
                                        std::size_t count);
  // Pool bytes of `count` tiles allocated together.
  static std::uint64_t PoolBytes(const kernels::TileShape& shape, std::size_t count);

  std::size_t size() const { return tiles_.size(); }
  bool empty() const { return tiles_.empty(); }
  std::uint64_t pool_bytes() const { return pool_bytes_; }
  // Those of the block summaries among them.
  std::uint64_t summary_bytes() const {
    std::uint64_t bytes = 0;
    for (const pool::Block& piece : pieces_) bytes += piece.bytes();
    return bytes;
  }

  std::byte* tile(std::size_t index) const { return tiles_[index].data(); }
  std::uint64_t tile_offset(std::size_t index) const { return tiles_[index].offset(); }
  // Null if the shape has no summaries.
  std::byte* summaries(std::size_t index) const {
    return summaries_.empty() ? nullptr : summaries_[index].data;
  }
  std::uint64_t summary_offset(std::size_t index) const { return summaries_[index].offset; }
  device::TilePlace place(std::size_t index) const { return {tile(index), summaries(index)}; }
  std::vector<device::TilePlace> places() const;

  // Appends tiles of the same shape.
  void Append(Tiles more);

 private:
  struct Summaries {
    std::uint64_t offset;
    std::byte* data;
  };
  absl::Status AddPiece(pool::Pool& pool, const kernels::TileLayout& layout, std::size_t tiles);

  std::vector<pool::Block> tiles_;
  std::vector<pool::Block> pieces_;   // summary memory; each piece holds those of consecutive tiles
  std::vector<Summaries> summaries_;  // by tile; empty if the shape has no summaries
  std::uint64_t pool_bytes_ = 0;
};

}  // namespace tessera::cache
