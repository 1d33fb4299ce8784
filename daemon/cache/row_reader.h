// Where appended rows come from: a tensor of a request, or a tail ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "proto/shm/lane_layout.h"

namespace tessera::cache {

// Copies `count` consecutive token rows of one lane, starting `first` tokens into the source, to
// destinations where rows lie one after another. The source may change while it is read: whatever
// was copied is checked afterwards, never the source.
class RowReader {
 public:
  virtual ~RowReader() = default;
  virtual void Copy(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
                    std::uint32_t count, std::byte* key, std::byte* value) const = 0;
};

// [layers][tokens][kv_heads][head_dim], one tensor for K and one for V; every layer alike.
class TensorRows final : public RowReader {
 public:
  struct Shape {
    std::uint32_t first_layer;
    std::uint64_t tokens;
    std::uint32_t kv_heads;
    std::size_t row_bytes;
  };
  TensorRows(const std::byte* key, const std::byte* value, const Shape& shape)
      : key_(key), value_(value), shape_(shape) {}

  void Copy(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const std::size_t row = shape_.row_bytes;
    std::size_t at =
        (((layer - shape_.first_layer) * shape_.tokens + first) * shape_.kv_heads + kv_head) * row;
    for (std::uint32_t i = 0; i < count; ++i, at += shape_.kv_heads * row) {
      std::memcpy(key + i * row, key_ + at, row);
      std::memcpy(value + i * row, value_ + at, row);
    }
  }

 private:
  const std::byte* key_;
  const std::byte* value_;
  Shape shape_;
};

// Tokens from `first_token` on, in the tail rings of one sequence.
class TailRows final : public RowReader {
 public:
  TailRows(const shm::LaneLayout& layout, std::byte* region, std::uint64_t first_token)
      : layout_(layout), region_(region), first_token_(first_token) {}

  void Copy(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const shm::TailRing ring = layout_.ring(region_, layer, kv_head);
    const std::size_t row = ring.tile.row_bytes();
    for (std::uint32_t done = 0; done < count;) {
      const std::uint64_t token = first_token_ + first + done;
      const std::uint32_t in_tile = static_cast<std::uint32_t>(token % kernels::kTileEntries);
      const std::uint32_t run = std::min(count - done, kernels::kTileEntries - in_tile);
      std::memcpy(key + done * row, ring.Key(token), run * row);
      std::memcpy(value + done * row, ring.Value(token), run * row);
      done += run;
    }
  }

 private:
  const shm::LaneLayout& layout_;
  std::byte* region_;
  std::uint64_t first_token_;
};

}  // namespace tessera::cache
