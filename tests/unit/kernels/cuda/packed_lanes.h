// Packed tiles and lanes with mixed strategies. Rows are written without the encoder, so that
// reader and writer share no code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/format/lane_view.h"
#include "kernels/format/tile_shape.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::tests {

inline float Normal(TestRandom& random) {
  const double u = (static_cast<double>(random.Below(1u << 30)) + 1) / (1u << 30);
  const double angle = static_cast<double>(random.Below(1u << 30)) / (1u << 30) * 6.283185307179586;
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(angle));
}

template <class T>
void Put(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// A tile whose rows hold random values in random channels; all other bytes are 0xff.
class PackedTile {
 public:
  PackedTile(const kernels::TileShape& shape, TestRandom& random, std::uint32_t rows = 32)
      : bytes_(kernels::LayoutOf(shape).bytes, std::byte{0xff}) {
    const kernels::TileLayout layout = kernels::LayoutOf(shape);
    for (std::uint32_t r = 0; r < rows; ++r) {
      const kernels::RowBytes& key = layout.key_row;
      FillRow(shape, shape.key, key.bits, bytes_.data() + layout.key_bits + r * key.bits,
              bytes_.data() + layout.key_scales + r * key.scale,
              bytes_.data() + layout.key_data + r * key.data, random);
      const kernels::RowBytes& value = layout.value_row;
      FillRow(shape, shape.value, value.bits, bytes_.data() + layout.value_bits + r * value.bits,
              bytes_.data() + layout.value_scales + r * value.scale,
              bytes_.data() + layout.value_data + r * value.data, random);
    }
  }
  std::byte* data() { return bytes_.data(); }
  const std::byte* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  static void FillRow(const kernels::TileShape& shape, const kernels::RowShape& side,
                      std::uint32_t row_bits, std::byte* bits, std::byte* scale, std::byte* data,
                      TestRandom& random) {
    std::vector<std::uint32_t> groups(side.channels / shape.group);
    std::iota(groups.begin(), groups.end(), 0u);
    for (std::size_t i = groups.size(); i > 1; --i)
      std::swap(groups[i - 1], groups[random.Below(i)]);
    std::fill_n(bits, row_bits, std::byte{0});
    for (std::uint32_t i = 0; row_bits != 0 && i < side.kept / shape.group; ++i) {
      bits[groups[i] / 8] |= static_cast<std::byte>(1u << (groups[i] % 8));
    }
    const kernels::ValueType type = kernels::ValuesOf(shape.format);
    if (kernels::IsScaled(type)) {
      const float peak = 3 * std::fabs(Normal(random)) + 0.5f;
      Put(scale, kernels::ScaleOf(type, peak));
    }
    for (std::uint32_t i = 0; i < side.kept; ++i) StoreValue(type, data, i, random);
  }
  static void StoreValue(kernels::ValueType type, std::byte* data, std::uint32_t index,
                         TestRandom& random) {
    switch (type) {
      case kernels::ValueType::kBf16:
        return Put(data + index * 2, kernels::FloatToBf16(Normal(random)));
      case kernels::ValueType::kFp16:
        return Put(data + index * 2, kernels::FloatToFp16(Normal(random)));
      case kernels::ValueType::kInt8:
        return Put(data + index, static_cast<std::uint8_t>(random.Below(255) - 127));
      case kernels::ValueType::kFp8: {
        std::uint8_t bits = static_cast<std::uint8_t>(random.Bits());
        if ((bits & 0x7f) == 0x7f) bits &= 0x80;  // no NaN
        return Put(data + index, bits);
      }
    }
  }

  std::vector<std::byte> bytes_;
};

// Bytes at a multiple of 64.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t size) : lines_(size / 64 + 1) {
    std::fill_n(data(), lines_.size() * 64, std::byte{0xff});
  }
  std::byte* data() { return lines_.data()->bytes; }
  std::size_t size() const { return lines_.size() * 64; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
};

// The shape of a random lane's segment.
struct SegmentShape {
  kernels::TileShape tile;
  std::uint32_t entries = 0;
  bool rotated = true;  // only for packed shapes; always if channels are truncated
  kernels::ElementType rotation_type = kernels::ElementType::kBf16;
};

// A segment with tiles and rotations. Rows that are not live are 0xff.
class RandomSegment {
 public:
  RandomSegment(const SegmentShape& shape, std::uint64_t first_position, TestRandom& random)
      : layout_(kernels::LayoutOf(shape.tile)),
        stride_((layout_.bytes + 63) / 64 * 64),
        arena_(std::size_t{(shape.entries + 31) / 32 + 1} * stride_ +
               std::size_t{(shape.entries + 31) / 32} * layout_.summary_bytes),
        key_(RotationSize(shape, shape.tile.key)),
        value_(RotationSize(shape, shape.tile.value)) {
    const std::uint32_t tiles = (shape.entries + 31) / 32;
    for (std::uint32_t t = 0; t < tiles; ++t) {
      offsets_.push_back((tiles - t) * stride_);
      summary_offsets_.push_back((tiles + 1) * stride_ + t * layout_.summary_bytes);
    }
    for (std::uint32_t t = 0; t < tiles; ++t) {
      FillTile(shape, std::min(32u, shape.entries - t * 32), arena_.data() + offsets_[t], random);
    }
    view_ = {.arena = arena_.data(),
             .arena_bytes = arena_.size(),
             .tile_offsets = offsets_.data(),
             .summary_offsets = layout_.summary_bytes != 0 ? summary_offsets_.data() : nullptr,
             .first_position = first_position,
             .position_span = shape.tile.positions ? next_position_ : 0,
             .entries = shape.entries,
             .shape = shape.tile};
    if (!shape.tile.packed() || !shape.rotated) return;
    FillRotation(shape, shape.tile.key, key_.data(), random);
    FillRotation(shape, shape.tile.value, value_.data(), random);
    view_.rotation = {.key = key_.data(), .value = value_.data(), .type = shape.rotation_type};
    // A side with all channels may have no matrix.
    const std::uint32_t head_dim = shape.tile.head_dim;
    if (shape.tile.key.channels == head_dim && random.OneIn(4)) view_.rotation.key = nullptr;
    if (shape.tile.value.channels == head_dim && random.OneIn(4)) view_.rotation.value = nullptr;
  }
  RandomSegment(const RandomSegment&) = delete;
  RandomSegment& operator=(const RandomSegment&) = delete;

  const kernels::SegmentView& view() const { return view_; }
  std::uint64_t end_position() const { return view_.first_position + view_.positions(); }
  std::vector<std::uint64_t>& offsets() { return offsets_; }
  std::vector<std::uint64_t>& summary_offsets() { return summary_offsets_; }
  std::byte* tile(std::uint32_t index) { return arena_.data() + offsets_[index]; }
  std::byte* summaries(std::uint32_t index) { return arena_.data() + summary_offsets_[index]; }
  const kernels::TileLayout& layout() const { return layout_; }

 private:
  static std::size_t RotationSize(const SegmentShape& shape, const kernels::RowShape& side) {
    return kernels::RotationBytes(shape.tile, side, shape.rotation_type);
  }
  void FillTile(const SegmentShape& shape, std::uint32_t rows, std::byte* tile,
                TestRandom& random) {
    if (shape.tile.packed()) {
      const PackedTile packed(shape.tile, random, rows);
      std::copy_n(packed.data(), packed.size(), tile);
    } else {
      const kernels::ElementType type = kernels::ElementsOf(shape.tile.format);
      for (std::uint32_t i = 0; i < rows * shape.tile.head_dim; ++i) {
        const std::size_t at = i * kernels::ElementBytes(type);
        StoreElement(type, Normal(random), tile + layout_.key_data + at);
        StoreElement(type, Normal(random), tile + layout_.value_data + at);
      }
    }
    for (std::uint32_t r = 0; r < rows; ++r) {
      const float weight =
          random.OneIn(16) ? 0.0f : static_cast<float>(random.Between(1, 12)) * 0.75f;
      if (shape.tile.weights) Put(tile + layout_.weights + r * 4, weight);
      if (!shape.tile.positions) continue;
      next_position_ += static_cast<std::uint32_t>(random.Between(1, 4));
      Put(tile + layout_.positions + r * 4, next_position_ - 1);
    }
    // Dead rows may have any position, even that of a visible row.
    for (std::uint32_t r = rows; r < 32 && shape.tile.positions; ++r) {
      Put(tile + layout_.positions + r * 4,
          static_cast<std::uint32_t>(random.Below(next_position_)));
    }
  }
  // Rows of length about one.
  static void FillRotation(const SegmentShape& shape, const kernels::RowShape& side,
                           std::byte* matrix, TestRandom& random) {
    const float unit = 1 / std::sqrt(static_cast<float>(shape.tile.head_dim));
    for (std::uint32_t i = 0; i < std::uint32_t{side.channels} * shape.tile.head_dim; ++i) {
      StoreElement(shape.rotation_type, Normal(random) * unit,
                   matrix + i * kernels::ElementBytes(shape.rotation_type));
    }
  }

  kernels::TileLayout layout_;
  std::uint64_t stride_;
  AlignedBytes arena_;
  AlignedBytes key_;
  AlignedBytes value_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> summary_offsets_;
  std::uint32_t next_position_ = 0;
  kernels::SegmentView view_;
};

}  // namespace tessera::tests
