// Writes the image of a StepView. Allocates nothing; the caller owns the (pinned) memory and
// uploads it.
//
//   StepWriter writer(memory, {.batch = 2, .layers = 32, .lanes = 512, ...});
//   writer.SetExtents(...); writer.SetSequence(0, ...); writer.SetSequence(1, ...);
//   for each layer: writer.BeginLayer(kv_heads, type);
//                   for each sequence, for each kv head: writer.AddLane(...);
//   if (writer.Finish() == StepStatus::kOk) upload the first writer.bytes() bytes
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/common/step_limits.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/format/dense_tile.h"
#include "kernels/format/lane_view.h"

namespace tessera::kernels::cuda {

struct StepShape {
  std::uint32_t batch = 0;
  std::uint32_t layers = 0;
  std::uint32_t lanes = 0;     // over all layers: sum of batch * kv_heads
  std::uint32_t segments = 0;  // over all lanes
  std::uint32_t extents = 0;
  std::uint32_t strategies = 0;  // over all lanes: segments that are not plain (CountStrategies)
  std::uint32_t selections = 0;  // at most: lanes of sequences that select
  std::uint32_t choices = 0;     // at most: their segments with summaries (CountChoices)
};

// A lane's contribution to StepShape::strategies.
std::uint32_t CountStrategies(const LaneView& lane);

// The contribution to StepShape::choices of a lane whose sequence selects.
std::uint32_t CountChoices(const LaneView& lane);

// No lane has more entries: a higher floor reads all of them, as this one does.
inline constexpr std::uint32_t kMaxFloor = ~0u;

// Converts a kernels::SelectionRule, which this folder does not depend on, to the image's form.
// Null: no rule.
template <class Rule>
StepRule StepRuleOf(const Rule* rule) {
  if (rule == nullptr) return {};
  return {.rate = rule->rate,
          .entries = rule->entries,
          .selects = 1,
          .by_share = rule->judge == Rule::Judge::kShare,
          .first_block = rule->first_block,
          .counts_tail = rule->counts_tail,
          .floor = static_cast<std::uint32_t>(std::min<std::uint64_t>(rule->floor, kMaxFloor))};
}

std::uint64_t StepBytes(const StepShape& shape);

enum class StepStatus : std::uint8_t {
  kOk,
  kImageTooSmall,  // the memory is smaller than StepBytes, or not 16-byte aligned
  kIncomplete,     // fewer or more layers, lanes, segments or strategies than the shape says
  // a table or rotation outside the extents, dense tiles of another type than the layer's, or a
  // shape without a kernel
  kBadSegment,
  kBadTail,        // a ring without tiles, or a misaligned ring
  kTooManyBlocks,  // more than kMostLayerBlocks blocks to select from in one layer
};

struct SegmentSpec {
  std::uint64_t tile_table = 0;     // pool offset
  std::uint64_t summary_table = 0;  // pool offset, if tiles have block summaries
  std::uint64_t first_position = 0;
  std::uint32_t entries = 0;
  TileShape shape;
  std::uint64_t position_span = 0;  // 0: as many as entries
  // For packed tiles and signs: pool offsets, or kNoRotation.
  std::uint64_t key_rotation = kNoRotation;
  std::uint64_t value_rotation = kNoRotation;
  ElementType rotation_type = ElementType::kBf16;
  // The means of a book, which planes have. Signs beside dense rows have the keys' side of one.
  std::uint64_t key_mean = kNoRotation;
  std::uint64_t value_mean = kNoRotation;
};

struct TailSpec {
  std::uint64_t ring = 0;  // device address; 0: no tail
  std::uint32_t ring_tiles = 0;
  std::uint64_t begin = 0;
};

class StepWriter {
 public:
  StepWriter(std::span<std::byte> image, const StepShape& shape);

  // Call before adding lanes. Bases are device addresses; 0 means that the extent is missing.
  void SetExtents(std::span<const std::uint64_t> bases, std::uint64_t extent_bytes);
  // Call before adding lanes of a sequence that selects.
  void SetSequence(std::uint32_t index, const StepSequence& sequence);
  void BeginLayer(std::uint32_t kv_heads, ElementType type);
  void AddLane(std::span<const SegmentSpec> segments, const TailSpec& tail);
  // Adds a lane whose views hold device addresses. No ring means no tail. Pool offsets are computed
  // from the distance of tables to their arena's base address, which need not be a real address.
  void AddLane(const LaneView& lane);

  // Returns the first error. After an error the image must not be used.
  StepStatus Finish();

  std::uint64_t bytes() const { return bytes_; }
  // Raises the limits to cover what was written.
  void Widen(StepLimits& limits) const;

 private:
  template <class T>
  T* At(std::uint64_t offset) {
    return reinterpret_cast<T*>(image_.data() + offset);
  }
  void Fail(StepStatus status) {
    if (status_ == StepStatus::kOk) status_ = status;
  }
  DeviceArena Arena();
  bool Fits(const SegmentSpec& segment);
  std::uint32_t AddStrategy(const SegmentSpec& segment);
  const StepRule& RuleOfLane();
  LastForced LastForcedOf(const SegmentSpec& segment);
  std::uint32_t AddChoice(const SegmentSpec& segment);
  void MarkKind(PartKind kind);
  void CloseSelection();
  void OpenLane(std::size_t segments, const TailSpec& tail);
  void AddSegment(const SegmentSpec& segment);
  void CloseLane();

  std::span<std::byte> image_;
  StepShape shape_;
  std::uint64_t bytes_ = 0;
  StepStatus status_ = StepStatus::kOk;
  ElementType type_ = ElementType::kBf16;
  std::uint32_t layers_ = 0;
  std::uint32_t lanes_ = 0;
  std::uint32_t lanes_due_ = 0;  // must exist when the current layer ends
  std::uint32_t segments_ = 0;
  std::uint32_t strategies_ = 0;
  StepLane lane_ = {};       // the open lane
  std::uint32_t works_ = 0;  // of the current layer
  std::uint32_t max_works_ = 0;
  std::uint32_t max_strategies_ = 0;  // of any layer
  std::uint32_t kinds_ = KindBit(PartKind::kDense);
  // Totals of the image, then the open lane's selection.
  std::uint32_t selections_ = 0;
  std::uint32_t choices_ = 0;
  StepSelection selection_ = {};
  std::uint64_t selectable_ = 0;  // entries
  std::uint32_t pieces_ = 0;      // of the open lane
  std::uint32_t whole_slots_ = 0;
  StepLimits selected_;  // maximum over all layers
};

}  // namespace tessera::kernels::cuda
