// Tracks whose rows are stored in planes, and how near the codes are to the rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/segment/book_shelf.h"
#include "daemon/cache/sequence/join.h"
#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/aligned_bytes.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {

inline constexpr const char* kPlanes = "planes:book_rows=256,recent=64";

class Planes : public CompactorTest {
 protected:
  // The world keeps its models, and with them their books.
  void TearDown() override {
    world_.tenant().memory().books->Drop(model_->id());
    CompactorTest::TearDown();
  }

  Track Compressed(std::uint64_t tokens, const std::string& policy = kPlanes) {
    Track track = NewTrack(*policies::ParsePolicy(policy));
    Append(track, tokens, 1);
    CompressAll(track);
    return track;
  }
  void CompressAll(Track& track) {
    const auto told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  Forms Expected(std::vector<std::pair<std::string, std::uint64_t>> parts) {
    Forms forms;
    for (const auto& [form, entries] : parts) forms.push_back(Concat(form, ": ", entries));
    return forms;
  }

  // Sums over the rows of one side.
  struct Sums {
    double error = 0;
    double energy = 0;
  };
  static void AddRow(const float* shown, const std::byte* row, std::uint32_t dim, Sums& sums) {
    for (std::uint32_t d = 0; d < dim; ++d) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, row + 2 * d, 2);
      const double exact = kernels::Bf16ToFloat(bits);
      sums.error += (shown[d] - exact) * (shown[d] - exact);
      sums.energy += exact * exact;
    }
  }
  // Empty if all lanes show the track's rows: dense ones exactly, coded ones within `share` of
  // their energy.
  std::string Near(const Track& track, double share = 0.02) {
    const cache::SequenceView view = View(track);
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t token = 0;
      for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
        Sums keys, values;
        for (std::uint32_t tile = 0; tile * 32 < segment.entries; ++tile) {
          AddTile(track, lane, segment, tile, token, keys, values);
        }
        const double most = segment.shape.planes() ? share : 0;
        if (keys.error > most * keys.energy || values.error > most * values.energy) {
          return Concat("layer ", lane.layer, ", head ", lane.kv_head, ", segment ", i,
                        ": key error ", keys.error, " of ", keys.energy, ", value error ",
                        values.error, " of ", values.energy);
        }
        token += segment.entries;
      }
      if (token != lane.resolved.tail_start) return "entries are missing";
    }
    return "";
  }
  // Empty if every index of signs is that of the track's rows, coded anew with the same book.
  std::string IndexProblem(const Track& track) {
    const kernels::Operations& operations = kernels::OperationsOf(cache::ReferenceKernels());
    const cache::SequenceView view = View(track);
    std::uint64_t indexed = 0;
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t token = 0;
      for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
        const bool signs = segment.shape.summary == kernels::Summary::kSigns;
        for (std::uint32_t tile = 0; signs && tile * 32 < segment.entries; ++tile) {
          const std::uint32_t rows = std::min(32u, segment.entries - tile * 32);
          if (rows < 32) continue;  // the last tile of a cut segment indexes more rows
          if (!HasIndexOf(operations, track, lane, segment, tile, token + tile * 32)) {
            return Concat("layer ", lane.layer, ", segment ", i, ", tile ", tile);
          }
          indexed += rows;
        }
        token += segment.entries;
      }
    }
    return indexed > 0 ? "" : "no row has an index";
  }
  bool HasIndexOf(const kernels::Operations& operations, const Track& track,
                  const cache::SequenceView::LaneOf& lane, const kernels::SegmentView& segment,
                  std::uint32_t tile, std::uint64_t first) {
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    kernels::AlignedBytes keys(32 * dense.row_bytes()), values(32 * dense.row_bytes());
    for (std::uint32_t i = 0; i < 32; ++i) {
      const std::uint64_t stamp = track.stamps[first + i];
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense,
              keys.data() + i * dense.row_bytes());
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense,
              values.data() + i * dense.row_bytes());
    }
    kernels::AlignedBytes prepared(operations.prepared_bytes(segment.shape, dense.type));
    operations.prepare_encode(segment.shape, dense.type, segment.rotation, prepared.data());
    kernels::AlignedBytes to(layout.bytes), index(layout.summary_bytes);
    EXPECT_TRUE(operations.encode({.key = keys.data(),
                                   .value = values.data(),
                                   .stride = dense.row_bytes(),
                                   .type = dense.type,
                                   .rows = 32,
                                   .weights = nullptr,
                                   .positions = nullptr,
                                   .shape = segment.shape,
                                   .layout = layout,
                                   .prepared = prepared.data(),
                                   .tile = to.data(),
                                   .summaries = index.data()}));
    return std::memcmp(index.data(), segment.arena + segment.summary_offsets[tile],
                       layout.summary_bytes) == 0;
  }
  void AddTile(const Track& track, const cache::SequenceView::LaneOf& lane,
               const kernels::SegmentView& segment, std::uint32_t tile, std::uint64_t first,
               Sums& keys, Sums& values) {
    const kernels::Operations& operations = kernels::OperationsOf(cache::ReferenceKernels());
    const std::uint32_t dim = segment.shape.head_dim;
    const std::uint32_t rows = std::min(32u, segment.entries - tile * 32);
    std::vector<float> decoded[2] = {std::vector<float>(32 * dim), std::vector<float>(32 * dim)};
    std::vector<float> shown[2] = {std::vector<float>(32 * dim), std::vector<float>(32 * dim)};
    operations.decode({.tile = segment.arena + segment.tile_offsets[tile],
                       .shape = segment.shape,
                       .layout = kernels::LayoutOf(segment.shape),
                       .rows = rows,
                       .padded_channels = dim,
                       .keys = decoded[0].data(),
                       .values = decoded[1].data()});
    for (const bool value : {false, true}) {
      const kernels::RotationView& book = segment.rotation;
      if (!segment.shape.planes()) {
        shown[value] = decoded[value];
        continue;
      }
      operations.unrotate({.rotation = value ? book.value : book.key,
                           .rotation_type = book.type,
                           .channels = dim,
                           .head_dim = dim,
                           .rows = decoded[value].data(),
                           .padded_channels = dim,
                           .row_count = rows,
                           .output = shown[value].data(),
                           .mean = value ? book.value_mean : book.key_mean});
    }
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    std::vector<std::byte> row(dense.row_bytes());
    for (std::uint32_t i = 0; i < rows; ++i) {
      const std::uint64_t stamp = track.stamps[first + tile * 32 + i];
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense, row.data());
      AddRow(shown[0].data() + i * dim, row.data(), dim, keys);
      DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense, row.data());
      AddRow(shown[1].data() + i * dim, row.data(), dim, values);
    }
  }
};

}  // namespace tessera::compaction
