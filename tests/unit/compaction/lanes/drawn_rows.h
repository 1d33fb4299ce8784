// K and V rows like those of models: low-dimensional, with occasional changes of the subspace. Each
// token has a stamp, and a row is a function of stamp and place, so that an oracle needs one number
// per token.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format/element.h"
#include "kernels/strategy/reduce/channels.h"
#include "tests/unit/cache/packed.h"
#include "tests/unit/cache/rows.h"

namespace tessera::compaction {

using Stamps = std::vector<std::uint64_t>;

// Bits of a stamp other than the token's number.
inline constexpr int kSubspaceShift = 40;
inline constexpr std::uint64_t kHuge = std::uint64_t{1} << 56;  // a value beyond fp16

inline Stamps DrawTokens(std::uint64_t count, std::uint64_t subspace) {
  static std::atomic<std::uint64_t> next{1};
  Stamps stamps(count);
  for (std::uint64_t& stamp : stamps) stamp = next.fetch_add(1) | subspace << kSubspaceShift;
  return stamps;
}

// Roughly normal with deviation 1: the sum of four uniform numbers.
inline float Drawn(std::uint64_t seed) {
  std::uint64_t word = (seed + 1) * 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  word ^= word >> 31;
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(word >> (16 * i) & 0xffff);
  return (sum / 65536.0f - 2.0f) * 1.7320508f;
}

// Four directions of the subspace, plus a little of everything.
inline void DrawRow(std::uint64_t stamp, const cache::RowPlace& place, kernels::DenseTile tile,
                    std::byte* out) {
  const std::uint64_t where = (std::uint64_t{place.layer} << 8 | place.kv_head << 1 |
                               static_cast<std::uint64_t>(place.kind))
                              << 44;
  const std::uint64_t subspace = (stamp >> kSubspaceShift & 0xff) << 20 | where;
  const std::uint64_t token = (stamp & 0xffffffff) << 9 | where;
  float along[4];
  for (std::uint64_t i = 0; i < 4; ++i) along[i] = 0.125f * Drawn(token + i);
  for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
    float element = 0.02f * Drawn(token + 8 + d);
    for (std::uint64_t i = 0; i < 4; ++i) element += along[i] * Drawn(subspace | i << 10 | d);
    if (d == 0 && (stamp & kHuge) != 0) element = 0x1p20f;
    if (tile.type == kernels::ElementType::kFp32) {
      std::memcpy(out + 4 * d, &element, 4);
    } else {
      const std::uint16_t bits = tile.type == kernels::ElementType::kBf16
                                     ? kernels::FloatToBf16(element)
                                     : kernels::FloatToFp16(element);
      std::memcpy(out + 2 * d, &bits, 2);
    }
  }
}

class DrawnRows final : public cache::MadeRows {
 public:
  DrawnRows(const shm::LaneLayout& layout, Stamps stamps)
      : MadeRows(layout), stamps_(std::move(stamps)) {}
  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    for (std::uint32_t i = 0; i < count; ++i) {
      DrawRow(stamps_[first + i], {layer, kv_head, cache::RowKind::kKey}, tile,
              key + i * tile.row_bytes());
      DrawRow(stamps_[first + i], {layer, kv_head, cache::RowKind::kValue}, tile,
              value + i * tile.row_bytes());
    }
  }

 private:
  const Stamps stamps_;
};

// Returns an empty string if every row that `lane` shows equals the encoding of the rows with these
// stamps in the segment's form, byte for byte, and full tiles also have the right summaries. A
// partially shown tile may contain more rows. `thinned_from`: rows that keep fewer channels may
// have been reduced from this number; 0: none.
inline std::string LaneDiffers(const cache::SequenceView& view,
                               const cache::SequenceView::LaneOf& lane, const cache::Model& model,
                               const Stamps& expected, std::uint16_t thinned_from = 0) {
  using kernels::kTileEntries;
  const kernels::DenseTile dense = model.layout().tile(lane.layer);
  const std::string where =
      "layer " + std::to_string(lane.layer) + " head " + std::to_string(lane.kv_head) + ": ";
  std::uint64_t token = 0;
  std::vector<std::byte> key(kTileEntries * dense.row_bytes()), value(key.size());
  for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
    const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
    const std::string here = where + "segment " + std::to_string(s) + ", ";
    if (segment.first_position != token) return here + "starts elsewhere";
    if (segment.entries == 0 || segment.position_span != segment.entries) return here + "no span";
    const cache::TileEncoder encoder(segment.shape, segment.rotation, dense.type);
    const kernels::TileLayout at = kernels::LayoutOf(segment.shape);
    for (std::uint32_t first = 0; first < segment.entries; first += kTileEntries) {
      const std::uint32_t rows = std::min(kTileEntries, segment.entries - first);
      const std::string tile_name = here + "tile " + std::to_string(first / kTileEntries);
      if (token + rows > expected.size()) return tile_name + " shows too many tokens";
      for (std::uint32_t r = 0; r < rows; ++r, ++token) {
        DrawRow(expected[token], {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense,
                key.data() + r * dense.row_bytes());
        DrawRow(expected[token], {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense,
                value.data() + r * dense.row_bytes());
      }
      const std::uint64_t offset = segment.tile_offsets[first / kTileEntries];
      if (offset % 64 != 0 || offset > segment.arena_bytes - at.bytes) {
        return tile_name + " is out of bounds";
      }
      const std::byte* const tile = segment.arena + offset;
      const auto is = [&](const std::vector<std::byte>& made) {
        const auto same = [&](std::uint32_t array, std::uint32_t bytes) {
          return std::memcmp(tile + array, made.data() + array, std::size_t{bytes} * rows) == 0;
        };
        return rows == kTileEntries
                   ? std::memcmp(tile, made.data(), at.bytes) == 0 &&
                         cache::HasSummaries(segment, first / kTileEntries, made.data() + at.bytes)
                   : same(at.key_bits, at.key_row.bits) && same(at.key_scales, at.key_row.scale) &&
                         same(at.key_data, at.key_row.data) &&
                         same(at.value_bits, at.value_row.bits) &&
                         same(at.value_scales, at.value_row.scale) &&
                         same(at.value_data, at.value_row.data);
      };
      if (is(encoder.Tile(key.data(), value.data(), dense.row_bytes(), rows))) continue;
      if (!segment.shape.packed() || segment.shape.key.kept >= thinned_from) {
        return tile_name + " is another's";
      }
      // Among channels with equal stored values any may have been kept.
      kernels::TileShape wide = segment.shape;
      wide.key.kept = wide.value.kept = thinned_from;
      const std::vector<std::byte> before =
          cache::TileEncoder(wide, segment.rotation, dense.type)
              .Tile(key.data(), value.data(), dense.row_bytes(), rows);
      std::vector<std::byte> thinned(kernels::TileAndSummaryBytes(at));
      kernels::ReduceTile(
          {wide, before.data(), kernels::SummariesAfter(before.data(), kernels::LayoutOf(wide)),
           rows, segment.shape, thinned.data(), kernels::SummariesAfter(thinned.data(), at)});
      if (!is(thinned)) return tile_name + " is another's";
    }
  }
  if (lane.resolved.entries != token || lane.resolved.tail_start != token) {
    return where + "entries or tail_start disagree with the segments";
  }
  if (view.tail != nullptr) {
    const shm::TailRing ring =
        model.layout().ring(view.tail->region().data(), lane.layer, lane.kv_head);
    for (; token < view.committed && token < expected.size(); ++token) {
      const cache::RowPlace place = {lane.layer, lane.kv_head, cache::RowKind::kKey};
      DrawRow(expected[token], place, dense, key.data());
      if (std::memcmp(ring.Key(token), key.data(), dense.row_bytes()) != 0) {
        return where + "token " + std::to_string(token) + " of the tail is another's";
      }
    }
  }
  if (token == expected.size()) return "";
  return where + "shows " + std::to_string(token) + " tokens, not " +
         std::to_string(expected.size());
}

inline std::string Differs(const cache::SequenceView& view, const cache::Model& model,
                           const Stamps& stamps, std::uint16_t thinned_from = 0) {
  for (const cache::SequenceView::LaneOf& lane : view.lanes) {
    std::string wrong = LaneDiffers(view, lane, model, stamps, thinned_from);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace tessera::compaction
