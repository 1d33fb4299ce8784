#include "kernels/cuda/host/step_writer.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/sign_index.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kSectionAlignment = 16;

StepHeader LayOut(const StepShape& shape) {
  StepHeader header = {};
  std::uint64_t offset = sizeof(StepHeader);
  const auto section = [&offset](std::uint64_t count, std::uint64_t bytes) {
    const std::uint64_t start = offset;
    offset =
        (offset + count * bytes + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
    return start;
  };
  header.sequences_offset = section(shape.batch, sizeof(StepSequence));
  header.layers_offset = section(shape.layers, sizeof(StepLayer));
  header.works_offset = section(std::uint64_t{shape.lanes} + shape.layers, sizeof(std::uint32_t));
  header.lanes_offset = section(shape.lanes, sizeof(StepLane));
  header.segments_offset = section(shape.segments, sizeof(StepSegment));
  header.strategies_offset = section(shape.strategies, sizeof(StepStrategy));
  header.selections_offset = section(shape.selections, sizeof(StepSelection));
  header.choices_offset = section(shape.choices, sizeof(StepChoice));
  const std::uint64_t counts = std::uint64_t{shape.selections} + shape.layers;
  header.pieces_offset = section(counts, sizeof(std::uint32_t));
  header.slots_offset = section(counts, sizeof(std::uint32_t));
  header.extents_offset = section(shape.extents, sizeof(std::uint64_t));
  header.magic = kStepMagic;
  header.bytes = offset;
  header.batch = shape.batch;
  header.layers = shape.layers;
  header.extents = shape.extents;
  return header;
}

// Pool offset of `address`. Views count from an arena's base address.
std::uint64_t OffsetIn(const std::byte* arena, const void* address) {
  return reinterpret_cast<std::uint64_t>(address) - reinterpret_cast<std::uint64_t>(arena);
}

SegmentSpec SpecOf(const SegmentView& segment) {
  const auto rotation = [&](const std::byte* matrix) {
    return matrix == nullptr ? kNoRotation : OffsetIn(segment.arena, matrix);
  };
  return {.tile_table = OffsetIn(segment.arena, segment.tile_offsets),
          .summary_table = segment.summary_offsets == nullptr
                               ? 0
                               : OffsetIn(segment.arena, segment.summary_offsets),
          .first_position = segment.first_position,
          .entries = segment.entries,
          .shape = segment.shape,
          .position_span = segment.positions(),
          .key_rotation = rotation(segment.rotation.key),
          .value_rotation = rotation(segment.rotation.value),
          .rotation_type = segment.rotation.type,
          .key_mean = rotation(segment.rotation.key_mean),
          .value_mean = rotation(segment.rotation.value_mean)};
}

// Returns true if a kernel may multiply a side by the matrix at `offset`. Without a rotation, no
// channel of the side may be cut.
bool RotationFits(const DeviceArena& arena, const SegmentSpec& segment, const RowShape& side,
                  std::uint64_t offset) {
  if (offset == kNoRotation) return side.channels == segment.shape.head_dim;
  return IsElementType(static_cast<std::uint8_t>(segment.rotation_type)) &&
         ResolveObject(arena, offset, RotationBytes(segment.shape, side, segment.rotation_type),
                       kTileAlignment) != 0;
}

// Returns true if the parts of a book that the shape needs are in the pool: all four with planes,
// the keys' with signs beside dense rows.
bool BookFits(const DeviceArena& arena, const SegmentSpec& segment) {
  const auto fits = [&](std::uint64_t offset, std::uint64_t bytes) {
    return offset != kNoRotation && ResolveObject(arena, offset, bytes, kTileAlignment) != 0;
  };
  const std::uint64_t row = segment.shape.head_dim * ElementBytes(ElementType::kBf16);
  const std::uint64_t matrix = segment.shape.head_dim * row;
  if (segment.rotation_type != ElementType::kBf16) return false;
  if (!fits(segment.key_rotation, matrix) || !fits(segment.key_mean, row)) return false;
  return !segment.shape.planes() ||
         (fits(segment.value_rotation, matrix) && fits(segment.value_mean, row));
}

// Raises the selection limits to cover `needed`.
void Cover(StepLimits& limits, const StepLimits& needed) {
  limits.selections = std::max(limits.selections, needed.selections);
  limits.choices = std::max(limits.choices, needed.choices);
  limits.blocks = std::max(limits.blocks, needed.blocks);
  limits.pieces = std::max(limits.pieces, needed.pieces);
  limits.slots = std::max(limits.slots, needed.slots);
  limits.selected_kinds |= needed.selected_kinds;
  limits.summaries |= needed.summaries;
}

}  // namespace

std::uint32_t CountStrategies(const LaneView& lane) {
  return static_cast<std::uint32_t>(
      std::count_if(lane.segments, lane.segments + lane.segment_count,
                    [](const SegmentView& segment) { return !IsPlain(segment.shape); }));
}

std::uint32_t CountChoices(const LaneView& lane) {
  return static_cast<std::uint32_t>(std::count_if(
      lane.segments, lane.segments + lane.segment_count, [](const SegmentView& segment) {
        return BlocksOf(segment.entries, segment.shape.block) != 0;
      }));
}

std::uint64_t StepBytes(const StepShape& shape) { return LayOut(shape).bytes; }

StepWriter::StepWriter(std::span<std::byte> image, const StepShape& shape)
    : image_(image), shape_(shape) {
  const StepHeader header = LayOut(shape);
  if (image.size() < header.bytes ||
      reinterpret_cast<std::uintptr_t>(image.data()) % kSectionAlignment != 0) {
    Fail(StepStatus::kImageTooSmall);
    return;
  }
  bytes_ = header.bytes;
  std::memset(image.data(), 0, header.bytes);
  std::memcpy(image.data(), &header, sizeof header);
  At<StepHeader>(0)->magic = 0;  // set by Finish: kernels reject a half-written image
}

void StepWriter::SetExtents(std::span<const std::uint64_t> bases, std::uint64_t extent_bytes) {
  if (status_ != StepStatus::kOk) return;
  if (bases.size() != shape_.extents) return Fail(StepStatus::kIncomplete);
  auto* header = At<StepHeader>(0);
  header->extent_bytes = extent_bytes;
  std::copy(bases.begin(), bases.end(), At<std::uint64_t>(header->extents_offset));
}

void StepWriter::SetSequence(std::uint32_t index, const StepSequence& sequence) {
  if (status_ != StepStatus::kOk) return;
  if (index >= shape_.batch) return Fail(StepStatus::kIncomplete);
  At<StepSequence>(At<StepHeader>(0)->sequences_offset)[index] = sequence;
}

void StepWriter::BeginLayer(std::uint32_t kv_heads, ElementType type) {
  if (status_ != StepStatus::kOk) return;
  const std::uint64_t due = std::uint64_t{lanes_} + std::uint64_t{shape_.batch} * kv_heads;
  if (layers_ == shape_.layers || lanes_ != lanes_due_ || due > shape_.lanes || kv_heads == 0) {
    return Fail(StepStatus::kIncomplete);
  }
  At<StepLayer>(At<StepHeader>(0)->layers_offset)[layers_] = {.kv_heads = kv_heads,
                                                              .first_lane = lanes_,
                                                              .first_strategy = strategies_,
                                                              .strategies = 0,
                                                              .kinds = KindBit(PartKind::kDense),
                                                              .first_selection = selections_,
                                                              .selections = 0,
                                                              .first_choice = choices_,
                                                              .choices = 0,
                                                              .blocks = 0,
                                                              .selected_kinds = 0,
                                                              .summaries = 0};
  At<std::uint32_t>(At<StepHeader>(0)->works_offset)[lanes_ + layers_] = 0;
  At<std::uint32_t>(At<StepHeader>(0)->pieces_offset)[selections_ + layers_] = 0;
  At<std::uint32_t>(At<StepHeader>(0)->slots_offset)[selections_ + layers_] = 0;
  ++layers_;
  lanes_due_ = static_cast<std::uint32_t>(due);
  type_ = type;
  works_ = 0;
}

DeviceArena StepWriter::Arena() {
  const StepHeader& header = *At<StepHeader>(0);
  return {.extent_bases = reinterpret_cast<std::uint64_t>(image_.data() + header.extents_offset),
          .extent_bytes = header.extent_bytes,
          .extents = header.extents};
}

bool StepWriter::Fits(const SegmentSpec& segment) {
  const TileShape& shape = segment.shape;
  if (!IsPlain(shape) && UnsupportedReason(shape) != nullptr) return false;
  if (!shape.packed() && shape.format != DenseFormat(type_)) return false;
  if (segment.entries == 0) return true;
  const DeviceArena arena = Arena();
  if (shape.planes() || HasSigns(shape)) {
    if (!BookFits(arena, segment)) return false;
  } else if (shape.packed() &&
             (!RotationFits(arena, segment, shape.key, segment.key_rotation) ||
              !RotationFits(arena, segment, shape.value, segment.value_rotation))) {
    return false;
  }
  const auto table_fits = [&](std::uint64_t table) {
    return ResolveObject(arena, table, std::uint64_t{TilesOf(segment.entries)} * 8, 8) != 0;
  };
  return table_fits(segment.tile_table) &&
         (shape.summary == Summary::kNone || table_fits(segment.summary_table));
}

void StepWriter::AddLane(std::span<const SegmentSpec> segments, const TailSpec& tail) {
  OpenLane(segments.size(), tail);
  for (const SegmentSpec& segment : segments) AddSegment(segment);
  CloseLane();
}

void StepWriter::AddLane(const LaneView& lane) {
  OpenLane(lane.segment_count, {.ring = reinterpret_cast<std::uint64_t>(lane.tail.ring),
                                .ring_tiles = lane.tail.ring_tiles,
                                .begin = lane.tail.begin});
  for (std::uint32_t i = 0; i < lane.segment_count; ++i) {
    AddSegment(SpecOf(lane.segments[i]));
  }
  CloseLane();
}

void StepWriter::OpenLane(std::size_t segments, const TailSpec& tail) {
  if (status_ != StepStatus::kOk) return;
  if (lanes_ == lanes_due_ || segments > shape_.segments - segments_) {
    return Fail(StepStatus::kIncomplete);
  }
  if (tail.ring != 0 && (tail.ring_tiles == 0 || tail.ring % kTileAlignment != 0)) {
    return Fail(StepStatus::kBadTail);
  }
  lane_ = {.first_segment = segments_,
           .segment_count = 0,
           .tail_ring = tail.ring,
           .tail_begin = tail.begin,
           .ring_tiles = tail.ring_tiles,
           .segment_parts = 0,
           .selection = kReadWhole,
           .reserved = 0};
  selection_ = {};
  selectable_ = 0;
  pieces_ = 0;
  whole_slots_ = 0;
}

void StepWriter::AddSegment(const SegmentSpec& segment) {
  if (status_ != StepStatus::kOk) return;
  if (!Fits(segment)) return Fail(StepStatus::kBadSegment);
  const bool plain = IsPlain(segment.shape);
  const bool selects =
      RuleOfLane().selects != 0 && BlocksOf(segment.entries, segment.shape.block) != 0;
  if ((!plain && strategies_ == shape_.strategies) || (selects && choices_ == shape_.choices)) {
    return Fail(StepStatus::kIncomplete);
  }
  At<StepSegment>(At<StepHeader>(0)->segments_offset)[segments_] = {
      .tile_table = segment.tile_table,
      .summary_table = segment.summary_table,
      .first_position = segment.first_position,
      .entries = segment.entries,
      .first_part = lane_.segment_parts,
      .strategy = plain ? kPlainSegment : AddStrategy(segment),
      .choice = selects ? AddChoice(segment) : kReadWhole};
  if (!selects) {
    lane_.segment_parts += PartsOf(segment.entries);
    if (!plain) MarkKind(KindOf(segment.shape));
  }
  selection_.last_forced = selects ? LastForcedOf(segment) : LastForced::kNo;
  const bool waits = segment.shape.block == 0 && !segment.shape.positions;
  selection_.unblocked =
      waits ? static_cast<std::uint8_t>(segment.entries % kTileEntries) : std::uint8_t{0};
  ++lane_.segment_count;
  ++segments_;
}

// Returns the index in the layer.
std::uint32_t StepWriter::AddStrategy(const SegmentSpec& segment) {
  StepLayer& layer = At<StepLayer>(At<StepHeader>(0)->layers_offset)[layers_ - 1];
  const std::uint64_t span = segment.position_span;
  At<StepStrategy>(At<StepHeader>(0)->strategies_offset)[strategies_++] = {
      .key_rotation = segment.key_rotation,
      .value_rotation = segment.value_rotation,
      .key_mean = segment.shape.planes() ? segment.key_mean : kNoRotation,
      .value_mean = segment.shape.planes() ? segment.value_mean : kNoRotation,
      .position_span = span != 0 ? span : segment.entries,
      .lane = lanes_ - layer.first_lane,
      .rotation_type = segment.rotation_type,
      .shape = segment.shape,
      .layout = LayoutOf(segment.shape)};
  max_strategies_ = std::max(max_strategies_, layer.strategies + 1);
  return layer.strategies++;
}

// For a segment that is read whole.
void StepWriter::MarkKind(PartKind kind) {
  StepLayer& layer = At<StepLayer>(At<StepHeader>(0)->layers_offset)[layers_ - 1];
  layer.kinds |= KindBit(kind);
  kinds_ |= layer.kinds;
}

const StepRule& StepWriter::RuleOfLane() {
  const StepHeader& header = *At<StepHeader>(0);
  const StepLayer& layer = At<StepLayer>(header.layers_offset)[layers_ - 1];
  const std::uint32_t sequence = (lanes_ - layer.first_lane) / layer.kv_heads;
  return At<StepSequence>(header.sequences_offset)[sequence].rule;
}

// When the last block is forced. Assumes that the segment selects and only the tail follows it.
LastForced StepWriter::LastForcedOf(const SegmentSpec& segment) {
  if (segment.entries % segment.shape.block != 0) return LastForced::kYes;
  return RuleOfLane().counts_tail != 0 ? LastForced::kWithoutTail : LastForced::kNo;
}

// Returns the index in the lane. The choice belongs to the segment that is added next.
std::uint32_t StepWriter::AddChoice(const SegmentSpec& segment) {
  const std::uint32_t block = segment.shape.block;
  const std::uint32_t blocks = BlocksOf(segment.entries, block);
  StepLayer& layer = At<StepLayer>(At<StepHeader>(0)->layers_offset)[layers_ - 1];
  At<StepChoice>(At<StepHeader>(0)->choices_offset)[choices_++] = {.segment = lane_.segment_count,
                                                                   .first_block = selection_.blocks,
                                                                   .blocks = blocks,
                                                                   .first_piece = pieces_};
  if (lane_.segment_count == 0) selection_.first_forced = RuleOfLane().first_block != 0 ? 1 : 0;
  selection_.blocks += blocks;
  selection_.tail_block = segment.shape.block;
  pieces_ += PiecesOf(segment.entries);
  whole_slots_ += SelectedPartsOf(blocks, block);
  selectable_ += segment.entries;
  layer.selected_kinds |= KindBit(SelectedKindOf(segment.shape));
  layer.summaries |= SummaryBit(segment.shape.summary);
  return selection_.choices++;
}

// A lane with nothing to select from is read like any other lane.
void StepWriter::CloseSelection() {
  if (selection_.choices == 0) return;
  StepHeader& header = *At<StepHeader>(0);
  StepLayer& layer = At<StepLayer>(header.layers_offset)[layers_ - 1];
  if (selections_ == shape_.selections) return Fail(StepStatus::kIncomplete);
  if (selection_.blocks > kMostLayerBlocks - layer.blocks) return Fail(StepStatus::kTooManyBlocks);
  lane_.selection = layer.selections;
  selection_.lane = lanes_ - layer.first_lane;
  selection_.first_choice = layer.choices;
  selection_.first_block = layer.blocks;
  At<StepSelection>(header.selections_offset)[selections_] = selection_;
  ++selections_;
  // Like works: layer l's counts begin at its first selection + l.
  auto* pieces = At<std::uint32_t>(header.pieces_offset) + selections_ + layers_ - 1;
  auto* slots = At<std::uint32_t>(header.slots_offset) + selections_ + layers_ - 1;
  pieces[0] = pieces[-1] + pieces_;
  slots[0] =
      slots[-1] + MostSelectedParts(RuleOfLane(), selectable_, selection_.choices, whole_slots_);
  layer.selections += 1;
  layer.choices += selection_.choices;
  layer.blocks += selection_.blocks;
  Cover(selected_, {.selections = layer.selections,
                    .choices = layer.choices,
                    .blocks = layer.blocks,
                    .pieces = pieces[0],
                    .slots = slots[0],
                    .selected_kinds = layer.selected_kinds,
                    .summaries = layer.summaries});
}

void StepWriter::CloseLane() {
  if (status_ != StepStatus::kOk) return;
  CloseSelection();
  if (status_ != StepStatus::kOk) return;
  At<StepLane>(At<StepHeader>(0)->lanes_offset)[lanes_] = lane_;
  works_ += PartsOf(lane_);
  max_works_ = std::max(max_works_, works_);
  // Layer l's counts begin at its first lane + l; lane i's end is one further.
  At<std::uint32_t>(At<StepHeader>(0)->works_offset)[lanes_ + layers_] = works_;
  ++lanes_;
}

void StepWriter::Widen(StepLimits& limits) const {
  limits.works = std::max(limits.works, max_works_);
  limits.strategies = std::max(limits.strategies, max_strategies_);
  limits.kinds |= kinds_;
  Cover(limits, selected_);
}

StepStatus StepWriter::Finish() {
  if (status_ != StepStatus::kOk) return status_;
  if (layers_ != shape_.layers || lanes_ != shape_.lanes || lanes_ != lanes_due_ ||
      segments_ > shape_.segments || strategies_ > shape_.strategies) {
    Fail(StepStatus::kIncomplete);
    return status_;
  }
  At<StepHeader>(0)->magic = kStepMagic;
  return StepStatus::kOk;
}

}  // namespace tessera::kernels::cuda
