// Attention over lanes that mix dense and packed segments: a batch on the emulated GPU, compared
// with double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <vector>

#include "kernels/cuda/common/error_bound.h"
#include "kernels/reference/tile_row.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/unit/kernels/cuda/packed_lanes.h"

namespace tessera::tests {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A lane of random segments and a dense tail.
class MixedLane {
 public:
  MixedLane(const std::vector<SegmentShape>& shapes, std::uint32_t tail, kernels::DenseTile tile,
            TestRandom& random)
      : ring_((tail / 32 + 2) * tile.bytes()) {
    std::uint64_t position = random.Below(100);
    for (const SegmentShape& shape : shapes) {
      segments_.emplace_back(shape, position, random);
      position = segments_.back().end_position();
      views_.push_back(segments_.back().view());
    }
    const std::uint32_t tiles = tail / 32 + 2;
    for (std::uint64_t t = position; t < position + tail; ++t) {
      std::byte* at = ring_.data() + t / 32 % tiles * tile.bytes();
      for (std::uint32_t c = 0; c < tile.head_dim; ++c) {
        const std::size_t element = c * kernels::ElementBytes(tile.type);
        const auto row = static_cast<std::uint32_t>(t % 32);
        StoreElement(tile.type, Normal(random), at + tile.key_offset(row) + element);
        StoreElement(tile.type, Normal(random), at + tile.value_offset(row) + element);
      }
    }
    view_ = {
        .segments = views_.data(),
        .segment_count = static_cast<std::uint32_t>(views_.size()),
        .tail = {
            .ring = ring_.data(), .ring_tiles = tiles, .begin = position, .end = position + tail}};
  }
  const kernels::LaneView& view() const { return view_; }
  RandomSegment& segment(std::size_t index) { return segments_[index]; }
  // Replaces a bf16 segment that keeps all channels by the dense segment of the same rows.
  void MakeDense(std::size_t index) {
    kernels::SegmentView& view = views_[index];
    const kernels::TileLayout& packed = segments_[index].layout();
    for (std::uint32_t t = 0; t < (view.entries + 31) / 32; ++t) {
      std::byte* tile = segments_[index].tile(t);
      const std::uint32_t bytes = 32 * packed.key_row.data;
      std::memmove(tile, tile + packed.key_data, bytes);
      std::memmove(tile + bytes, tile + packed.value_data, bytes);
    }
    view.shape = kernels::DenseShape(view.shape.head_dim, kernels::ElementType::kBf16);
  }
  kernels::SegmentView& segment_view(std::size_t index) { return views_[index]; }

 private:
  std::deque<RandomSegment> segments_;
  std::vector<kernels::SegmentView> views_;
  AlignedBytes ring_;
  kernels::LaneView view_;
};

// Computes one attention row in double precision from the stored rows, and the error allowed for
// the kernels.
class Judge {
 public:
  Judge(const kernels::LayerGeometry& geometry, bool causal, const std::byte* query,
        std::uint64_t position, double sink)
      : geometry_(geometry), causal_(causal), position_(position), sink_(sink) {
    for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
      query_.push_back(kernels::ElementAt(query, c, geometry.type));
    }
  }

  void AddLane(const kernels::LaneView& lane) {
    for (std::uint32_t s = 0; s < lane.segment_count; ++s) AddSegment(lane.segments[s]);
    const kernels::TileShape shape = kernels::DenseShape(geometry_.head_dim, geometry_.type);
    const kernels::TileLayout layout = kernels::LayoutOf(shape);
    for (std::uint64_t t = lane.tail.begin; t < lane.tail.end; ++t) {
      AddEntry(shape, layout, {}, lane.tail.ring + t / 32 % lane.tail.ring_tiles * layout.bytes,
               static_cast<std::uint32_t>(t % 32), t, query_);
    }
  }

  void ExpectNear(const float* output, float lse) const {
    double max = sink_;
    for (const Entry& entry : entries_) max = std::max(max, entry.logit);
    double sum = max > -kInfinity ? std::exp(sink_ - max) : 0;
    std::vector<double> expected(geometry_.head_dim);
    for (const Entry& entry : entries_) {
      if (entry.logit == -kInfinity) continue;
      const double weight = std::exp(entry.logit - max);
      sum += weight;
      for (std::uint32_t c = 0; c < geometry_.head_dim; ++c) expected[c] += weight * entry.value[c];
    }
    for (std::uint32_t c = 0; c < geometry_.head_dim; ++c) {
      const double exact = sum == 0 ? 0 : expected[c] / sum;
      ASSERT_LE(std::fabs(output[c] - exact), error_ * peak_ + std::fabs(exact) * 0x1p-24)
          << "channel " << c << ": " << output[c] << ", exact " << exact << "; " << entries_.size()
          << " entries, error " << error_ << ", peak " << peak_;
    }
    if (sum == 0) {
      ASSERT_EQ(lse, -INFINITY);
    } else {
      ASSERT_LE(std::fabs(lse - (max + std::log(sum))), error_ + std::fabs(lse) * 0x1p-22);
    }
  }
  std::size_t entries() const { return entries_.size(); }

 private:
  struct Entry {
    double logit;
    std::vector<double> value;
  };

  static double At(const std::byte* rotation, const kernels::SegmentView& segment, std::uint32_t c,
                   std::uint32_t d) {
    return kernels::ElementAt(rotation, std::size_t{c} * segment.shape.head_dim + d,
                              segment.rotation.type);
  }

  void AddSegment(const kernels::SegmentView& segment) {
    std::vector<double> query = query_;
    if (segment.rotation.key != nullptr) {
      for (std::uint32_t c = 0; c < segment.shape.key.channels; ++c) {
        query[c] = 0;
        for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
          query[c] += At(segment.rotation.key, segment, c, d) * query_[d];
        }
      }
    }
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      const std::byte* tile = segment.arena + segment.tile_offsets[e / 32];
      const std::uint64_t first =
          segment.first_position + (segment.shape.positions ? 0 : e - e % 32);
      AddEntry(segment.shape, layout, segment, tile, e % 32,
               kernels::PositionOf(segment.shape, layout, tile, first, e % 32), query);
    }
  }

  void AddEntry(const kernels::TileShape& shape, const kernels::TileLayout& layout,
                const kernels::SegmentView& segment, const std::byte* tile, std::uint32_t row,
                std::uint64_t position, const std::vector<double>& query) {
    if (causal_ && position > position_) return;
    if (geometry_.sliding_window != 0 && position + geometry_.sliding_window <= position_) return;
    std::vector<double> key(shape.key.channels), value(shape.value.channels);
    kernels::ReadRow(kernels::KeyRow(shape, layout, tile, row), key.data());
    kernels::ReadRow(kernels::ValueRow(shape, layout, tile, row), value.data());
    double logit = 0, mass = 0;
    for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
      logit += query[c] * key[c] * geometry_.scale;
      mass += std::fabs(query[c] * key[c] * geometry_.scale);
    }
    const float cap = geometry_.logit_softcap;
    if (cap != 0) logit = cap * std::tanh(logit / cap);
    const double weight = kernels::WeightOf(shape, layout, tile, row);
    const kernels::ErrorBound bound =
        shape.packed() ? kernels::cuda::PackedErrorBound(kernels::ValuesOf(shape.format))
                       : kernels::cuda::CudaErrorBound(geometry_.type);
    error_ = std::max(error_, bound.At(mass + cap));
    entries_.push_back({.logit = logit + std::log(weight), .value = Unrotated(segment, value)});
  }

  std::vector<double> Unrotated(const kernels::SegmentView& segment,
                                const std::vector<double>& value) {
    std::vector<double> out(geometry_.head_dim);
    for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
      double magnitude = 0;
      for (std::uint32_t c = 0; c < value.size(); ++c) {
        const double factor = segment.rotation.value == nullptr
                                  ? (c == d ? 1 : 0)
                                  : At(segment.rotation.value, segment, c, d);
        out[d] += factor * value[c];
        magnitude += std::fabs(factor * value[c]);
      }
      peak_ = std::max(peak_, magnitude);
    }
    return out;
  }

  const kernels::LayerGeometry& geometry_;
  bool causal_;
  std::uint64_t position_;
  double sink_;
  std::vector<double> query_;
  std::vector<Entry> entries_;
  double error_ = 0;
  double peak_ = 0;
};

// A batch of mixed lanes with queries and results.
class MixedProblem {
 public:
  MixedProblem(const kernels::LayerGeometry& geometry, bool causal, TestRandom& random)
      : geometry_(geometry), causal_(causal), random_(random) {}

  // Adds a lane whose entries are all visible.
  void AddSeen(const SegmentShape& shape) {
    Add({shape}, 0, 1, 0);
    items_.back().first_query_position = lanes_.back().view().tail.end;
  }

  void Add(const std::vector<SegmentShape>& shapes, std::uint32_t tail, std::uint32_t queries,
           std::uint32_t kv_head) {
    const kernels::DenseTile tile = {.head_dim = geometry_.head_dim, .type = geometry_.type};
    MixedLane& lane = lanes_.emplace_back(shapes, tail, tile, random_);
    const std::uint64_t end = lane.view().tail.end;
    Buffers& buffers = buffers_.emplace_back();
    const std::size_t rows = std::size_t{queries} * geometry_.query_heads;
    buffers.query.resize(rows * tile.row_bytes());
    for (std::size_t i = 0; i < rows * geometry_.head_dim; ++i) {
      StoreElement(geometry_.type, Normal(random_),
                   buffers.query.data() + i * kernels::ElementBytes(geometry_.type));
    }
    buffers.output.resize(rows * geometry_.head_dim);
    buffers.lse.resize(rows);
    // Usually after the lane, sometimes anywhere in it.
    const std::uint64_t first = random_.OneIn(4) ? random_.Below(end + 1) : end - end % 2;
    items_.push_back({.lane = &lane.view(),
                      .kv_head = kv_head,
                      .queries = queries,
                      .first_query_position = first,
                      .query = buffers.query.data(),
                      .output = buffers.output.data(),
                      .lse = buffers.lse.data()});
  }

  std::uint64_t Run(const EmulatedGrid& grid) {
    for (Buffers& buffers : buffers_) {
      std::fill(buffers.output.begin(), buffers.output.end(), NAN);
      std::fill(buffers.lse.begin(), buffers.lse.end(), NAN);
    }
    return EmulateHostBatch({.geometry = geometry_,
                             .causal = causal_,
                             .output_type = kernels::ElementType::kFp32,
                             .items = items_},
                            grid);
  }

  void ExpectRight() {
    for (std::size_t i = 0; i < items_.size(); ++i) ExpectItemRight(i);
  }
  void ExpectItemRight(std::size_t i) {
    const kernels::cuda::HostItem& item = items_[i];
    const std::uint32_t group = geometry_.group();
    for (std::uint32_t column = 0; column < item.queries * group; ++column) {
      const std::uint32_t query = column / group;
      const std::uint32_t head = item.kv_head * group + column % group;
      const std::size_t row = std::size_t{query} * geometry_.query_heads + head;
      const std::size_t row_bytes = geometry_.head_dim * kernels::ElementBytes(geometry_.type);
      Judge judge(geometry_, causal_, buffers_[i].query.data() + row * row_bytes,
                  item.first_query_position + query,
                  geometry_.sinks == nullptr ? -kInfinity : geometry_.sinks[head]);
      judge.AddLane(*item.lane);
      SCOPED_TRACE(testing::Message() << "item " << i << " query " << query << " head " << head);
      judge.ExpectNear(buffers_[i].output.data() + row * geometry_.head_dim, buffers_[i].lse[row]);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  std::vector<float> Results(std::size_t item) const {
    std::vector<float> all = buffers_[item].output;
    all.insert(all.end(), buffers_[item].lse.begin(), buffers_[item].lse.end());
    return all;
  }
  MixedLane& lane(std::size_t item) { return lanes_[item]; }
  std::vector<kernels::cuda::HostItem>& items() { return items_; }

 private:
  struct Buffers {
    std::vector<std::byte> query;
    std::vector<float> output, lse;
  };
  kernels::LayerGeometry geometry_;
  bool causal_;
  TestRandom& random_;
  std::deque<MixedLane> lanes_;
  std::deque<Buffers> buffers_;
  std::vector<kernels::cuda::HostItem> items_;
};

inline kernels::LayerGeometry Geometry(kernels::ElementType type, std::uint32_t head_dim,
                                       std::uint32_t kv_heads, std::uint32_t group) {
  return {.query_heads = kv_heads * group,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .type = type,
          .scale = 1 / std::sqrt(static_cast<float>(head_dim))};
}

inline SegmentShape Packed(kernels::ValueType values, std::uint32_t head_dim, std::uint32_t group,
                           std::uint32_t channels, std::uint32_t kept, std::uint32_t entries) {
  const kernels::RowShape row = {static_cast<std::uint16_t>(channels),
                                 static_cast<std::uint16_t>(kept)};
  return {.tile = {.format = kernels::PackedFormat(values),
                   .head_dim = static_cast<std::uint16_t>(head_dim),
                   .key = row,
                   .value = row,
                   .group = static_cast<std::uint8_t>(group)},
          .entries = entries};
}

// Gives values another shape than keys: all channels, or any number of channels and kept channels.
// Sometimes keys have no bitmap.
inline void PartSides(SegmentShape& shape, TestRandom& random) {
  kernels::TileShape& tile = shape.tile;
  const std::uint64_t all = tile.head_dim / tile.group;
  const std::uint64_t groups = random.OneIn(2) ? all : random.Between(1, all);
  const std::uint64_t kept = random.OneIn(2) ? groups : random.Between(1, groups);
  tile.value = {.channels = static_cast<std::uint16_t>(groups * tile.group),
                .kept = static_cast<std::uint16_t>(kept * tile.group)};
  if (random.OneIn(2)) tile.key.kept = tile.key.channels;
  shape.rotated = shape.rotated || groups != all;
}

}  // namespace tessera::tests
