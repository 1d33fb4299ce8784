// Packings, rotations and checks of packed rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/cache/segment/pack.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/rotations.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {

inline const kernels::Implementation& ReferenceKernels() {
  return *kernels::FindImplementation("reference");
}

using fakes::RandomRotations;

// A packing and the rotations that it points to.
struct TestPacking {
  PackSpec spec;
  std::vector<std::byte> key;
  std::vector<std::byte> value;
};

inline kernels::TileShape RandomShape(TestRandom& random, std::uint32_t head_dim,
                                      kernels::ElementType type, bool may_cut) {
  kernels::TileShape shape = kernels::DenseShape(head_dim, type);
  shape.summary = static_cast<kernels::Summary>(random.Below(3));
  if (shape.summary != kernels::Summary::kNone) {
    shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
    if (random.OneIn(4)) return shape;
  }
  shape.format = kernels::PackedFormat(static_cast<kernels::ValueType>(random.Between(1, 4)));
  shape.group = static_cast<std::uint8_t>(1u << random.Below(3));
  if (may_cut && random.OneIn(2)) {
    shape.key.channels =
        static_cast<std::uint16_t>(shape.group * random.Between(1, head_dim / shape.group));
  }
  shape.key.kept =
      static_cast<std::uint16_t>(shape.group * random.Between(1, shape.key.channels / shape.group));
  shape.value = shape.key;
  return shape;
}

// For layers [first, first + layers), which must be alike if rotated.
inline TestPacking RandomPacking(TestRandom& random, const Model& model, std::uint32_t first,
                                 std::uint32_t layers) {
  TestPacking packing;
  packing.spec.first_layer = first;
  bool alike = true;
  for (std::uint32_t i = 0; i < layers; ++i) {
    alike = alike &&
            model.layout().tile(first + i).head_dim == model.layout().tile(first).head_dim &&
            model.layout().kv_heads(first + i) == model.layout().kv_heads(first);
  }
  const bool rotated = alike && random.OneIn(2);
  const kernels::TileShape shape =
      RandomShape(random, model.layout().tile(first).head_dim, model.spec().type, rotated);
  for (std::uint32_t i = 0; i < layers; ++i) {
    packing.spec.shapes.push_back(alike
                                      ? shape
                                      : RandomShape(random, model.layout().tile(first + i).head_dim,
                                                    model.spec().type, false));
  }
  if (!rotated || !shape.packed()) return packing;
  packing.spec.rotation_type =
      random.OneIn(2) ? kernels::ElementType::kBf16 : kernels::ElementType::kFp32;
  const std::size_t matrices = std::size_t{layers} * model.layout().kv_heads(first);
  packing.key = RandomRotations(random, matrices, shape.key.channels, shape.head_dim,
                                packing.spec.rotation_type);
  packing.value = RandomRotations(random, matrices, shape.key.channels, shape.head_dim,
                                  packing.spec.rotation_type);
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  return packing;
}

inline absl::Status Proceed() { return absl::OkStatus(); }

// Encodes rows under one strategy with the kernels.
class TileEncoder {
 public:
  TileEncoder(const kernels::TileShape& shape, const kernels::RotationView& rotation,
              kernels::ElementType type)
      : shape_(shape), type_(type), prepared_(operations_.prepared_bytes(shape, type)) {
    operations_.prepare_encode(shape, type, rotation, prepared_.data());
  }
  // Rows are `stride` bytes apart. Returns the tile directly followed by its summaries.
  std::vector<std::byte> Tile(const std::byte* key, const std::byte* value, std::uint64_t stride,
                              std::uint32_t rows) const {
    const kernels::TileLayout layout = kernels::LayoutOf(shape_);
    std::vector<std::byte> tile(kernels::TileAndSummaryBytes(layout));
    EXPECT_TRUE(operations_.encode({.key = key,
                                    .value = value,
                                    .stride = stride,
                                    .type = type_,
                                    .rows = rows,
                                    .weights = nullptr,
                                    .positions = nullptr,
                                    .shape = shape_,
                                    .layout = layout,
                                    .prepared = prepared_.data(),
                                    .tile = tile.data(),
                                    .summaries = kernels::SummariesAfter(tile.data(), layout)}));
    return tile;
  }

 private:
  const kernels::Operations& operations_ = kernels::OperationsOf(ReferenceKernels());
  const kernels::TileShape shape_;
  const kernels::ElementType type_;
  std::vector<std::byte> prepared_;
};

// Whether a tile of the segment has these summaries.
inline bool HasSummaries(const kernels::SegmentView& segment, std::uint32_t tile,
                         const std::byte* expected) {
  const std::uint64_t bytes = kernels::LayoutOf(segment.shape).summary_bytes;
  if (bytes == 0) return segment.summary_offsets == nullptr;
  const std::uint64_t offset = segment.summary_offsets[tile];
  return offset % kernels::kSummaryAlignment == 0 && offset <= segment.arena_bytes - bytes &&
         std::memcmp(segment.arena + offset, expected, bytes) == 0;
}

// Whether row `row` of a tile encodes the token with this stamp. A row's bytes depend on no other
// row.
inline bool IsPackedRow(const std::byte* tile, std::uint32_t row, const kernels::SegmentView& view,
                        const TileEncoder& encoder, kernels::DenseTile dense, std::uint32_t layer,
                        std::uint32_t kv_head, std::uint64_t stamp) {
  std::byte key[256 * 4], value[256 * 4];
  MakeRow(stamp, {layer, kv_head, RowKind::kKey}, dense, key);
  MakeRow(stamp, {layer, kv_head, RowKind::kValue}, dense, value);
  const std::vector<std::byte> one = encoder.Tile(key, value, dense.row_bytes(), 1);
  const kernels::TileLayout at = kernels::LayoutOf(view.shape);
  const auto same = [&](std::uint32_t array, std::uint32_t bytes) {
    return std::memcmp(tile + array + row * bytes, one.data() + array, bytes) == 0;
  };
  return same(at.key_bits, at.key_row.bits) && same(at.key_scales, at.key_row.scale) &&
         same(at.key_data, at.key_row.data) && same(at.value_bits, at.value_row.bits) &&
         same(at.value_scales, at.value_row.scale) && same(at.value_data, at.value_row.data);
}

// Like Differs, for lanes with packed segments. Returns an empty string if they agree.
inline std::string PackedDiffers(const SequenceView& view, const Model& model,
                                 const std::vector<std::vector<std::uint64_t>>& stamps) {
  for (const SequenceView::LaneOf& lane : view.lanes) {
    const kernels::DenseTile dense = model.layout().tile(lane.layer);
    const std::vector<std::uint64_t>& expected = stamps[lane.layer];
    const std::string where =
        "layer " + std::to_string(lane.layer) + " head " + std::to_string(lane.kv_head) + ": ";
    std::uint64_t token = 0;
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      if (segment.first_position != token) return where + "a segment starts elsewhere";
      if (segment.position_span != segment.entries) return where + "a span that is no count";
      const TileEncoder encoder(segment.shape, segment.rotation, dense.type);
      for (std::uint32_t e = 0; e < segment.entries; ++e, ++token) {
        const std::uint64_t offset = segment.tile_offsets[e / kernels::kTileEntries];
        if (offset % 64 != 0 ||
            offset > segment.arena_bytes - kernels::LayoutOf(segment.shape).bytes) {
          return where + "a tile out of bounds";
        }
        if (token >= expected.size() ||
            !IsPackedRow(segment.arena + offset, e % kernels::kTileEntries, segment, encoder, dense,
                         lane.layer, lane.kv_head, expected[token])) {
          return where + "token " + std::to_string(token) + " of segment " + std::to_string(s) +
                 " is another's";
        }
      }
    }
    if (lane.resolved.entries != token || lane.resolved.tail_start != token) {
      return where + "entries or tail_start disagree with the segments";
    }
    if (view.tail != nullptr) {
      const shm::TailRing ring =
          model.layout().ring(view.tail->region().data(), lane.layer, lane.kv_head);
      for (; token < view.committed; ++token) {
        const auto is_row = [&](const std::byte* row, RowKind kind) {
          return IsRow(row, expected[token], {lane.layer, lane.kv_head, kind}, dense);
        };
        if (token >= expected.size() || !is_row(ring.Key(token), RowKind::kKey) ||
            !is_row(ring.Value(token), RowKind::kValue)) {
          return where + "token " + std::to_string(token) + " of the tail is another's";
        }
      }
    }
    if (token != expected.size()) {
      return where + "shows " + std::to_string(token) + " tokens, not " +
             std::to_string(expected.size());
    }
  }
  return "";
}

}  // namespace tessera::cache
