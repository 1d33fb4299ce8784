// Computes lane numbers and tail ring offsets from a model's geometry. Daemon and worker must agree
// on them, so both use this class.
//
// Lanes are layer-major: the kv heads of layer 0, then those of layer 1, and so on. Tail rings
// follow each other in lane order, each rounded up to 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/dense_tile.h"
#include "proto/shm/layout.h"
#include "proto/shm/tail_ring.h"

namespace tessera::shm {

struct LayerShape {
  std::uint32_t kv_heads;
  std::uint32_t head_dim;
};

class LaneLayout {
 public:
  LaneLayout() = default;
  // `ring_tiles`: capacity of each lane's tail ring, in tiles.
  LaneLayout(kernels::ElementType type, std::uint32_t ring_tiles,
             const std::vector<LayerShape>& shapes)
      : type_(type), ring_tiles_(ring_tiles) {
    for (const LayerShape& shape : shapes) {
      layers_.push_back({lanes_, shape, ring_bytes_});
      lanes_ += shape.kv_heads;
      ring_bytes_ += std::uint64_t{shape.kv_heads} * RingStride(shape.head_dim);
    }
  }

  std::uint32_t layers() const { return static_cast<std::uint32_t>(layers_.size()); }
  std::uint32_t lanes() const { return lanes_; }
  std::uint32_t lane(std::uint32_t layer, std::uint32_t kv_head) const {
    return layers_[layer].first_lane + kv_head;
  }
  std::uint32_t kv_heads(std::uint32_t layer) const { return layers_[layer].shape.kv_heads; }
  kernels::DenseTile tile(std::uint32_t layer) const {
    return {layers_[layer].shape.head_dim, type_};
  }
  std::uint64_t tail_bytes() const { return ring_bytes_; }
  std::uint32_t ring_tiles() const { return ring_tiles_; }
  std::uint64_t ring_capacity() const { return std::uint64_t{ring_tiles_} * kernels::kTileEntries; }
  // The ring of a lane in the tail region that starts at `region`.
  TailRing ring(std::byte* region, std::uint32_t layer, std::uint32_t kv_head) const {
    const Layer& at = layers_[layer];
    return {region + at.ring_offset + std::uint64_t{kv_head} * RingStride(at.shape.head_dim),
            ring_tiles_, tile(layer)};
  }

 private:
  struct Layer {
    std::uint32_t first_lane;
    LayerShape shape;
    std::uint64_t ring_offset;
  };
  std::uint64_t RingStride(std::uint32_t head_dim) const {
    const std::uint64_t bytes = ring_tiles_ * kernels::DenseTile{head_dim, type_}.bytes();
    return (bytes + kObjectAlignment - 1) / kObjectAlignment * kObjectAlignment;
  }

  kernels::ElementType type_ = kernels::ElementType::kBf16;
  std::uint32_t ring_tiles_ = 0;
  std::vector<Layer> layers_;
  std::uint32_t lanes_ = 0;
  std::uint64_t ring_bytes_ = 0;
};

}  // namespace tessera::shm
