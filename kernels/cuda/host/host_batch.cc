#include "kernels/cuda/host/host_batch.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/sign_index.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t RoundUp(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

bool IsServedSegment(const SegmentView& segment, const DenseTile& tile) {
  const TileShape& shape = segment.shape;
  if (UnsupportedReason(shape) != nullptr || shape.head_dim != tile.head_dim) return false;
  if (!shape.packed() && shape.format != DenseFormat(tile.type)) return false;
  return HasRequiredRotations(shape, segment.rotation);
}

// Checks what cannot be packed for the device. The device itself checks tile offsets and tail
// lengths.
bool CanBePacked(const LaneView& lane, const DenseTile& tile) {
  if (lane.tail.ring_tiles == 0 && lane.tail.begin != lane.tail.end) return false;
  return std::all_of(lane.segments, lane.segments + lane.segment_count,
                     [&](const SegmentView& segment) { return IsServedSegment(segment, tile); });
}

std::uint64_t MeanBytes(const TileShape& shape) {
  return std::uint64_t{shape.head_dim} * ElementBytes(ElementType::kBf16);
}
std::uint64_t RotationBytes(const SegmentView& segment, const RowShape& side) {
  return kernels::RotationBytes(segment.shape, side, segment.rotation.type);
}

// What the kernels read of a segment's rotations. Dense rows have none, except keys with signs.
struct Sides {
  explicit Sides(const SegmentView& segment) {
    const RotationView& all = segment.rotation;
    const TileShape& shape = segment.shape;
    if (shape.packed() || HasSigns(shape)) key = all.key;
    if (shape.packed()) value = all.value;
    if (shape.planes() || HasSigns(shape)) key_mean = all.key_mean;
    if (shape.planes()) value_mean = all.value_mean;
  }
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  const std::byte* key_mean = nullptr;
  const std::byte* value_mean = nullptr;
};

}  // namespace

HostBatchImage::HostBatchImage(const HostBatch& batch, std::uint64_t extent_bytes)
    : batch_(batch),
      extent_bytes_(extent_bytes),
      tile_{.head_dim = batch.geometry.head_dim, .type = batch.geometry.type},
      output_row_bytes_(std::uint64_t{batch.geometry.query_heads} * batch.geometry.head_dim *
                        ElementBytes(batch.output_type)),
      next_(extent_bytes),
      bad_item_(static_cast<std::uint32_t>(batch.items.size())) {
  MeasurePool();
  pool_.resize(std::uint64_t{extents_ - 1} * extent_bytes_);
  next_ = extent_bytes_;
  const std::uint64_t query_row_bytes =
      std::uint64_t{batch.geometry.query_heads} * tile_.row_bytes();
  limits_ = {.batch = static_cast<std::uint32_t>(batch.items.size()), .queries = 1, .works = 0};
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    const HostItem& item = batch.items[i];
    if (!CanBePacked(*item.lane, tile_)) bad_item_ = std::min(bad_item_, i);
    lanes_.push_back(i < bad_item_ ? PackLane(*item.lane) : PackedLane{});
    const auto* rows = static_cast<const std::byte*>(item.query);
    queries_.insert(queries_.end(), rows, rows + item.queries * query_row_bytes);
    rows_ += item.queries;
    limits_.queries = std::max(limits_.queries, item.queries);
  }
}

// Dry run of the allocations of all packable items, to count the extents that they need.
void HostBatchImage::MeasurePool() {
  for (const HostItem& item : batch_.items) {
    if (!CanBePacked(*item.lane, tile_)) break;
    for (std::uint32_t s = 0; s < item.lane->segment_count; ++s) {
      const SegmentView& segment = item.lane->segments[s];
      const std::uint32_t tiles = TilesOf(segment.entries);
      Allocate(std::uint64_t{tiles} * 8);
      const TileLayout layout = LayoutOf(segment.shape);
      for (std::uint32_t t = 0; t < tiles; ++t) Allocate(layout.bytes);
      if (layout.summary_bytes != 0) {
        Allocate(std::uint64_t{tiles} * 8);
        for (std::uint32_t t = 0; t < tiles; ++t) Allocate(layout.summary_bytes);
      }
      const Sides sides(segment);
      if (sides.key != nullptr) Allocate(RotationBytes(segment, segment.shape.key));
      if (sides.value != nullptr) Allocate(RotationBytes(segment, segment.shape.value));
      if (sides.key_mean != nullptr) Allocate(MeanBytes(segment.shape));
      if (sides.value_mean != nullptr) Allocate(MeanBytes(segment.shape));
    }
  }
  extents_ = static_cast<std::uint32_t>((next_ + extent_bytes_ - 1) / extent_bytes_);
}

std::uint64_t HostBatchImage::Allocate(std::uint64_t bytes) {
  const std::uint64_t rounded = RoundUp(bytes, kTileAlignment);
  if (next_ / extent_bytes_ != (next_ + rounded - 1) / extent_bytes_) {
    next_ = RoundUp(next_, extent_bytes_);
  }
  const std::uint64_t offset = next_;
  next_ += rounded;
  return offset;
}

std::byte* HostBatchImage::PoolAt(std::uint64_t offset) {
  const std::uint64_t place = offset / extent_bytes_;
  return pool_.data() + (extents_ - 1 - place) * extent_bytes_ + offset % extent_bytes_;
}

void HostBatchImage::PackObject(const SegmentView& segment, std::uint64_t host_offset,
                                std::uint32_t bytes, std::uint64_t alignment,
                                std::uint64_t table_word) {
  std::uint64_t offset = Allocate(bytes);
  if (host_offset > segment.arena_bytes || bytes > segment.arena_bytes - host_offset) {
    offset = std::uint64_t{extents_} * extent_bytes_;  // invalid on the device, as on the host
  } else if (host_offset % alignment != 0) {
    offset += host_offset % alignment;
  } else {
    std::memcpy(PoolAt(offset), segment.arena + host_offset, bytes);
  }
  std::memcpy(PoolAt(table_word), &offset, sizeof offset);
}

std::uint64_t HostBatchImage::PackRotation(const SegmentView& segment, const RowShape& side,
                                           const std::byte* matrix) {
  if (matrix == nullptr) return kNoRotation;
  const std::uint64_t offset = Allocate(RotationBytes(segment, side));
  std::memcpy(
      PoolAt(offset), matrix,
      std::size_t{side.channels} * segment.shape.head_dim * ElementBytes(segment.rotation.type));
  return offset;
}

std::uint64_t HostBatchImage::PackMean(const SegmentView& segment, const std::byte* mean) {
  if (mean == nullptr) return kNoRotation;
  const std::uint64_t offset = Allocate(MeanBytes(segment.shape));
  std::memcpy(PoolAt(offset), mean, MeanBytes(segment.shape));
  return offset;
}

SegmentSpec HostBatchImage::PackSegment(const SegmentView& segment) {
  const std::uint32_t tiles = TilesOf(segment.entries);
  const TileLayout layout = LayoutOf(segment.shape);
  const std::uint64_t table = Allocate(std::uint64_t{tiles} * 8);
  for (std::uint32_t t = 0; t < tiles; ++t) {
    PackObject(segment, segment.tile_offsets[t], layout.bytes, kTileAlignment,
               table + std::uint64_t{t} * 8);
  }
  std::uint64_t summary_table = 0;
  if (layout.summary_bytes != 0) summary_table = Allocate(std::uint64_t{tiles} * 8);
  for (std::uint32_t t = 0; t < tiles && layout.summary_bytes != 0; ++t) {
    const std::uint64_t from = segment.summary_offsets != nullptr
                                   ? segment.summary_offsets[t]
                                   : segment.tile_offsets[t] + layout.bytes;
    PackObject(segment, from, layout.summary_bytes, kSummaryAlignment,
               summary_table + std::uint64_t{t} * 8);
  }
  const Sides sides(segment);
  return {.tile_table = table,
          .summary_table = summary_table,
          .first_position = segment.first_position,
          .entries = segment.entries,
          .shape = segment.shape,
          .position_span = segment.positions(),
          .key_rotation = PackRotation(segment, segment.shape.key, sides.key),
          .value_rotation = PackRotation(segment, segment.shape.value, sides.value),
          .rotation_type = segment.rotation.type,
          .key_mean = PackMean(segment, sides.key_mean),
          .value_mean = PackMean(segment, sides.value_mean)};
}

HostBatchImage::PackedLane HostBatchImage::PackLane(const LaneView& lane) {
  PackedLane packed;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    packed.segments.push_back(PackSegment(lane.segments[s]));
  }
  packed.has_tail = lane.tail.ring_tiles != 0;
  packed.tail_offset = tails_.size();
  if (packed.has_tail) {
    const std::byte* ring = lane.tail.ring;
    tails_.insert(tails_.end(), ring, ring + lane.tail.ring_tiles * tile_.bytes());
  }
  return packed;
}

StepStatus HostBatchImage::WriteStep(std::uint64_t pool_address, std::uint64_t tails_address) {
  const std::uint32_t kv_heads = batch_.geometry.kv_heads;
  StepShape shape = {.batch = limits_.batch,
                     .layers = 1,
                     .lanes = limits_.batch * kv_heads,
                     .segments = 0,
                     .extents = extents_};
  for (std::uint32_t i = 0; i < limits_.batch; ++i) {
    const PackedLane& lane = lanes_[i];
    if (batch_.items[i].rule.selects != 0) {
      ++shape.selections;
      shape.choices += static_cast<std::uint32_t>(lane.segments.size());
    }
    shape.segments += static_cast<std::uint32_t>(lane.segments.size());
    for (const SegmentSpec& segment : lane.segments) shape.strategies += !IsPlain(segment.shape);
  }
  step_storage_.resize(StepBytes(shape) + 16);
  const auto base = reinterpret_cast<std::uintptr_t>(step_storage_.data());
  step_ = std::span(step_storage_).subspan(RoundUp(base, 16) - base, StepBytes(shape));

  StepWriter writer(step_, shape);
  std::vector<std::uint64_t> bases(extents_, 0);
  for (std::uint32_t place = 1; place < extents_; ++place) {
    bases[place] = pool_address + (extents_ - 1 - place) * extent_bytes_;
  }
  writer.SetExtents(bases, extent_bytes_);
  writer.BeginLayer(kv_heads, batch_.geometry.type);
  std::uint32_t row = 0;
  for (std::uint32_t i = 0; i < limits_.batch; ++i) {
    const HostItem& item = batch_.items[i];
    const bool has_tail = lanes_[i].has_tail;
    writer.SetSequence(i, {.committed = has_tail ? item.lane->tail.end : 0,
                           .first_query_position = item.first_query_position,
                           .appended = 0,
                           .queries = item.queries,
                           .first_append_row = 0,
                           .first_query_row = row,
                           .rule = item.rule});
    for (std::uint32_t head = 0; head < kv_heads; ++head) {
      if (head != item.kv_head) {
        writer.AddLane({}, {});
        continue;
      }
      TailSpec tail;
      if (has_tail) {
        tail = {.ring = tails_address + lanes_[i].tail_offset,
                .ring_tiles = item.lane->tail.ring_tiles,
                .begin = item.lane->tail.begin};
      }
      writer.AddLane(lanes_[i].segments, tail);
    }
    row += item.queries;
  }
  writer.Widen(limits_);
  return writer.Finish();
}

void HostBatchImage::Scatter(std::span<const std::byte> output, std::span<const float> lse) const {
  const LayerGeometry& geometry = batch_.geometry;
  const std::uint64_t head_bytes =
      std::uint64_t{geometry.head_dim} * ElementBytes(batch_.output_type);
  std::uint64_t first_row = 0;
  for (std::uint32_t i = 0; i < batch_.items.size(); ++i) {
    const HostItem& item = batch_.items[i];
    const std::uint32_t first_head = item.kv_head * geometry.group();
    for (std::uint32_t q = 0; q < item.queries && i < bad_item_; ++q) {
      const std::uint64_t in_item = q * output_row_bytes_ + first_head * head_bytes;
      std::memcpy(static_cast<std::byte*>(item.output) + in_item,
                  output.data() + first_row * output_row_bytes_ + in_item,
                  geometry.group() * head_bytes);
      if (item.lse == nullptr) continue;
      const std::uint64_t head = std::uint64_t{q} * geometry.query_heads + first_head;
      std::copy_n(lse.data() + first_row * geometry.query_heads + head, geometry.group(),
                  item.lse + head);
    }
    first_row += item.queries;
  }
}

}  // namespace tessera::kernels::cuda
