// Tiles of one shape in the pool, and the summaries of their blocks, which lie apart: those of
// tiles that were allocated together stand side by side, so that a selection reads them as one
// stream.
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
  // All of them or none.
  static absl::StatusOr<Tiles> Allocate(pool::Pool& pool, const kernels::TileShape& shape,
                                        std::size_t count);
  // What so many take in a pool when they are allocated together.
  static std::uint64_t PoolBytes(const kernels::TileShape& shape, std::size_t count);

  std::size_t size() const { return tiles_.size(); }
  bool empty() const { return tiles_.empty(); }
  std::uint64_t pool_bytes() const { return pool_bytes_; }

  std::byte* tile(std::size_t index) const { return tiles_[index].data(); }
  std::uint64_t tile_offset(std::size_t index) const { return tiles_[index].offset(); }
  // Null where the shape has none.
  std::byte* summaries(std::size_t index) const {
    return summaries_.empty() ? nullptr : summaries_[index].data;
  }
  std::uint64_t summary_offset(std::size_t index) const { return summaries_[index].offset; }
  device::TilePlace place(std::size_t index) const { return {tile(index), summaries(index)}; }
  std::vector<device::TilePlace> places() const;

  // Those of the same shape that follow.
  void Append(Tiles more);

 private:
  struct Summaries {
    std::uint64_t offset;
    std::byte* data;
  };
  absl::Status AddPiece(pool::Pool& pool, const kernels::TileLayout& layout, std::size_t tiles);

  std::vector<pool::Block> tiles_;
  std::vector<pool::Block> pieces_;   // of summaries, one tile's after another's
  std::vector<Summaries> summaries_;  // by tile; none where the shape has none
  std::uint64_t pool_bytes_ = 0;
};

}  // namespace tessera::cache
