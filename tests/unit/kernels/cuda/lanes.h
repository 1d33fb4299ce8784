// Random lanes in host memory: ragged segments whose tiles are scattered over an arena, a tail
// anywhere in its ring, and NaN in every row that is not live.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/format/dense_tile.h"
#include "kernels/format/lane_view.h"

namespace tessera::tests {

inline void StoreElement(kernels::ElementType type, float value, std::byte* at) {
  std::uint16_t half = 0;
  switch (type) {
    case kernels::ElementType::kBf16:
      half = kernels::FloatToBf16(value);
      break;
    case kernels::ElementType::kFp16:
      half = kernels::FloatToFp16(value);
      break;
    case kernels::ElementType::kFp32:
      std::memcpy(at, &value, sizeof value);
      return;
  }
  std::memcpy(at, &half, sizeof half);
}

inline float LoadElement(kernels::ElementType type, const std::byte* at) {
  if (type == kernels::ElementType::kFp32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, at, sizeof half);
  return type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(half)
                                             : kernels::Fp16ToFloat(half);
}

inline void FillRow(kernels::DenseTile tile, std::mt19937_64& random, std::byte* row) {
  std::normal_distribution<float> normal;
  for (std::uint32_t c = 0; c < tile.head_dim; ++c) {
    StoreElement(tile.type, normal(random), row + c * kernels::ElementBytes(tile.type));
  }
}

struct LaneShape {
  std::vector<std::uint32_t> segments;  // entries per segment
  std::uint32_t tail = 0;               // live tokens in the ring
  std::uint32_t ring_tiles = 0;
};

class RandomLane {
 public:
  RandomLane(kernels::DenseTile tile, const LaneShape& shape, std::mt19937_64& random)
      : tile_(tile) {
    std::uint64_t tiles = 1;
    for (std::uint32_t entries : shape.segments) tiles += (entries + 31) / 32;
    std::vector<std::uint64_t> places(2 * tiles);
    for (std::uint64_t i = 0; i < places.size(); ++i) places[i] = i * tile.bytes();
    std::shuffle(places.begin(), places.end(), random);
    arena_.assign(places.size() * tile.bytes(), std::byte{0xff});
    std::uint64_t position = 0;
    for (std::uint32_t entries : shape.segments) {
      std::vector<std::uint64_t>& table = tables_.emplace_back();
      for (std::uint32_t e = 0; e < entries; ++e) {
        if (e % 32 == 0) {
          table.push_back(places.back());
          places.pop_back();
        }
        FillEntry(random, arena_.data() + table.back(), e % 32);
      }
      segments_.push_back({.arena = arena_.data(),
                           .arena_bytes = arena_.size(),
                           .tile_offsets = table.data(),
                           .first_position = position,
                           .entries = entries,
                           .shape = kernels::DenseShape(tile.head_dim, tile.type)});
      position += entries;
    }
    ring_.assign(shape.ring_tiles * tile.bytes(), std::byte{0xff});
    for (std::uint64_t t = position; t < position + shape.tail; ++t) {
      FillEntry(random, ring_.data() + t / 32 % shape.ring_tiles * tile.bytes(), t % 32);
    }
    view_ = {.segments = segments_.data(),
             .segment_count = static_cast<std::uint32_t>(segments_.size()),
             .tail = {.ring = ring_.data(),
                      .ring_tiles = shape.ring_tiles,
                      .begin = position,
                      .end = position + shape.tail}};
  }
  RandomLane(const RandomLane&) = delete;
  RandomLane& operator=(const RandomLane&) = delete;

  const kernels::LaneView& view() const { return view_; }
  kernels::LaneView& mutable_view() { return view_; }
  std::vector<std::uint64_t>& table(std::size_t segment) { return tables_[segment]; }
  kernels::SegmentView& segment(std::size_t index) { return segments_[index]; }
  std::uint64_t tokens() const { return view_.tail.end; }

  // Sets every channel of the segments' K rows and V rows.
  void SetEveryElement(kernels::DenseTile tile, float key, float value) {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      for (std::uint32_t e = 0; e < segments_[s].entries; ++e) {
        SetRows(tile, arena_.data() + tables_[s][e / 32], e % 32, key, value);
      }
    }
  }
  void SetFirstElement(kernels::DenseTile tile, float key, float value) {
    SetRows(tile, arena_.data() + tables_[0][0], 0, key, value);
  }

 private:
  static void SetRows(kernels::DenseTile tile, std::byte* at, std::uint32_t row, float key,
                      float value) {
    for (std::uint32_t c = 0; c < tile.head_dim; ++c) {
      const std::size_t element = c * kernels::ElementBytes(tile.type);
      StoreElement(tile.type, key, at + tile.key_offset(row) + element);
      StoreElement(tile.type, value, at + tile.value_offset(row) + element);
    }
  }
  void FillEntry(std::mt19937_64& random, std::byte* tile, std::uint64_t row) {
    const auto r = static_cast<std::uint32_t>(row);
    FillRow(tile_, random, tile + tile_.key_offset(r));
    FillRow(tile_, random, tile + tile_.value_offset(r));
  }

  kernels::DenseTile tile_;
  std::vector<std::byte> arena_;
  std::vector<std::byte> ring_;
  std::vector<std::vector<std::uint64_t>> tables_;
  std::vector<kernels::SegmentView> segments_;
  kernels::LaneView view_;
};

}  // namespace tessera::tests
