// Sources of appended rows: a tensor of a request, or a tail ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "daemon/device/device.h"
#include "proto/shm/lane_layout.h"

namespace tessera::cache {

// Rows of one lane at equal distances.
struct RowSpan {
  const std::byte* key;  // the first row
  const std::byte* value;
  std::uint64_t stride;  // bytes between rows
  std::uint32_t rows;    // at least 1
};

// Locates the rows of tokens of a lane. The device copies and validates them. The memory may belong
// to a worker and may change while it is read.
class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual device::Place place() const = 0;
  // The row at offset `first` in the source, and up to `count - 1` rows after it.
  virtual RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
                     std::uint32_t count) const = 0;
};

// [layers][tokens][kv_heads][head_dim], one tensor each for K and V; all layers have the same
// shape.
class TensorRows final : public RowSource {
 public:
  struct Shape {
    std::uint32_t first_layer;
    std::uint64_t tokens;
    std::uint32_t kv_heads;
    std::size_t row_bytes;
  };
  TensorRows(device::Place place, const std::byte* key, const std::byte* value, const Shape& shape)
      : place_(place), key_(key), value_(value), shape_(shape) {}

  device::Place place() const override { return place_; }
  RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
             std::uint32_t count) const override {
    const std::size_t token = shape_.kv_heads * shape_.row_bytes;
    const std::size_t at =
        ((layer - shape_.first_layer) * shape_.tokens + first) * token + kv_head * shape_.row_bytes;
    return {key_ + at, value_ + at, token, count};
  }

 private:
  const device::Place place_;
  const std::byte* const key_;
  const std::byte* const value_;
  const Shape shape_;
};

// The tokens from `first_token` on, in the tail rings of one sequence.
class TailRows final : public RowSource {
 public:
  TailRows(const shm::LaneLayout& layout, std::byte* region, std::uint64_t first_token)
      : layout_(layout), region_(region), first_token_(first_token) {}

  device::Place place() const override { return device::Place::kDevice; }
  RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
             std::uint32_t count) const override {
    const shm::TailRing ring = layout_.ring(region_, layer, kv_head);
    const std::uint64_t token = first_token_ + first;
    const std::uint32_t in_tile = static_cast<std::uint32_t>(token % kernels::kTileEntries);
    return {ring.Key(token), ring.Value(token), ring.tile.row_bytes(),
            std::min(count, kernels::kTileEntries - in_tile)};
  }

 private:
  const shm::LaneLayout& layout_;
  std::byte* const region_;
  const std::uint64_t first_token_;
};

}  // namespace tessera::cache
