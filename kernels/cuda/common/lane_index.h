// Index arithmetic: locates tiles, rings and parts, and computes what a query sees. Shared by the
// kernels and by the host code that plans for them. Host tests check it against plain loops.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/step_view.h"
#include "kernels/cuda/common/target.h"
#include "kernels/cuda/common/tuning.h"
#include "kernels/format/dense_tile.h"

namespace tessera::kernels::cuda {

static_assert(kSplitEntries % kTileEntries == 0);
inline constexpr std::uint32_t kPartTiles = kSplitEntries / kTileEntries;
static_assert(kPartTiles <= 32, "each lane of a warp holds the address of one tile");
static_assert(kTileEntries % kSliceEntries == 0, "a slice must not cross tiles");

inline constexpr std::uint64_t kTileAlignment = 64;  // alignment of every object in a pool

struct EntryRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;

  TESSERA_HOST_DEVICE constexpr bool Contains(std::uint32_t entry) const {
    return entry >= begin && entry < end;
  }
  TESSERA_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  TESSERA_HOST_DEVICE constexpr bool Meets(std::uint32_t first, std::uint32_t count) const {
    return first < end && begin < first + count && begin < end;
  }
};

struct Positions {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct VisibleRule {
  bool causal = true;
  std::uint32_t window = 0;  // 0: no window
};

// Positions p that the query at `position` sees: position - window < p, and p <= position if
// causal.
TESSERA_HOST_DEVICE constexpr Positions VisibleFrom(std::uint64_t position, VisibleRule rule) {
  const std::uint64_t next = position + 1;
  return {.begin = rule.window != 0 && next > rule.window ? next - rule.window : 0,
          .end = rule.causal ? next : ~std::uint64_t{0}};
}

// Positions that any of the queries [first, first + queries) sees.
TESSERA_HOST_DEVICE constexpr Positions VisibleFromAll(std::uint64_t first, std::uint32_t queries,
                                                       VisibleRule rule) {
  if (queries == 0) return {};
  return {.begin = VisibleFrom(first, rule).begin,
          .end = VisibleFrom(first + queries - 1, rule).end};
}

// The entries of `live` that lie at `visible` positions, if entry 0 is at position `base`.
TESSERA_HOST_DEVICE constexpr EntryRange VisibleEntries(std::uint64_t base, EntryRange live,
                                                        Positions visible) {
  const std::uint64_t from = visible.begin > base ? visible.begin - base : 0;
  const std::uint64_t to = visible.end > base ? visible.end - base : 0;
  const std::uint32_t end = to < live.end ? static_cast<std::uint32_t>(to) : live.end;
  const std::uint32_t begin =
      from > live.begin ? (from < end ? static_cast<std::uint32_t>(from) : end) : live.begin;
  return {.begin = begin, .end = end > begin ? end : begin};
}

TESSERA_HOST_DEVICE constexpr std::uint32_t TilesOf(std::uint32_t entries) {
  return static_cast<std::uint32_t>((std::uint64_t{entries} + kTileEntries - 1) / kTileEntries);
}

TESSERA_HOST_DEVICE constexpr std::uint32_t PartsOf(std::uint32_t entries) {
  return static_cast<std::uint32_t>((std::uint64_t{entries} + kSplitEntries - 1) / kSplitEntries);
}

TESSERA_HOST_DEVICE constexpr std::uint32_t PartsOf(const StepLane& lane) {
  return lane.segment_parts + (lane.tail_ring != 0 ? 1 : 0);
}

TESSERA_HOST_DEVICE constexpr std::uint32_t RingSlot(std::uint64_t token,
                                                     std::uint32_t ring_tiles) {
  return static_cast<std::uint32_t>(token / kTileEntries % ring_tiles);
}

// Returns true if tokens [begin, end) all fit in a ring at once.
TESSERA_HOST_DEVICE constexpr bool RingHolds(std::uint64_t begin, std::uint64_t end,
                                             std::uint32_t ring_tiles) {
  return begin <= end && end - begin <= std::uint64_t{ring_tiles} * kTileEntries;
}

// Returns the device address of `bytes` at a pool offset, or 0 if they do not lie in one extent.
TESSERA_HOST_DEVICE inline std::uint64_t ResolveObject(const DeviceArena& arena,
                                                       std::uint64_t offset, std::uint64_t bytes,
                                                       std::uint64_t alignment) {
  if (arena.extent_bytes == 0 || offset % alignment != 0) return 0;
  const std::uint64_t extent = offset / arena.extent_bytes;
  const std::uint64_t within = offset % arena.extent_bytes;
  if (extent >= arena.extents || bytes > arena.extent_bytes - within) return 0;
  const std::uint64_t base = reinterpret_cast<const std::uint64_t*>(arena.extent_bases)[extent];
  return base == 0 ? 0 : base + within;
}

// Returns the index of the segment that contains part `part` of a lane. Requires part <
// segment_parts.
TESSERA_HOST_DEVICE inline std::uint32_t FindSegment(const StepSegment* segments,
                                                     std::uint32_t count, std::uint32_t part) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (segments[middle].first_part <= part ? low : high) = middle;
  }
  return low;
}

// One part of a lane, as the kernels walk it. Entry e is row e % 32 of the part's tile e / 32. Its
// position is base_position + e, or, in tiles with positions, base_position + the tile's position
// word.
struct PartRef {
  std::uint64_t base_position = 0;
  // Entries that some query sees; others are never read. All entries if tiles have positions.
  EntryRange entries;
  bool tail = false;
  bool sound = true;  // false: the tail is longer than its ring
  // Segments only: pool offset of the table word of the part's tile 0.
  std::uint64_t tile_table = 0;
  std::uint64_t ring = 0;  // tails only
  std::uint32_t ring_tiles = 0;
  std::uint32_t ring_slot = 0;  // ring slot of the part's tile 0
  PartKind kind = PartKind::kDense;
  bool positions = false;
  std::uint32_t strategy = kPlainSegment;  // index in the layer
};

TESSERA_HOST_DEVICE inline PartRef LocateTail(const StepLane& lane, const StepSequence& sequence,
                                              Positions visible) {
  PartRef part;
  part.tail = true;
  const std::uint64_t end = sequence.committed + sequence.appended;
  part.sound = RingHolds(lane.tail_begin, end, lane.ring_tiles);
  if (!part.sound) return part;
  part.base_position = lane.tail_begin / kTileEntries * kTileEntries;
  const EntryRange live = {.begin = static_cast<std::uint32_t>(lane.tail_begin % kTileEntries),
                           .end = static_cast<std::uint32_t>(end - part.base_position)};
  part.entries = VisibleEntries(part.base_position, live, visible);
  part.ring = lane.tail_ring;
  part.ring_tiles = lane.ring_tiles;
  part.ring_slot = lane.ring_tiles == 0 ? 0 : RingSlot(lane.tail_begin, lane.ring_tiles);
  return part;
}

// Sets the fields of `part` that depend on its strategy. `part` describes a plain segment before.
TESSERA_HOST_DEVICE inline void ApplyStrategy(const StepStrategy& strategy,
                                              const StepSegment& segment, std::uint32_t live,
                                              Positions visible, PartRef& part) {
  part.strategy = segment.strategy;
  part.kind = KindOf(strategy.shape);
  if (!strategy.shape.positions) return;
  part.positions = true;
  part.base_position = segment.first_position;
  // The position words decide which rows are in range, so only the kernel that reads them can tell.
  const bool meets = visible.end > segment.first_position &&
                     (visible.begin <= segment.first_position ||
                      visible.begin - segment.first_position < strategy.position_span);
  part.entries = {.begin = 0, .end = meets ? live : 0};
}

// Locates part `part` of a lane of layer `layer`. Parts of segments come first, in order; the tail
// is last.
TESSERA_HOST_DEVICE inline PartRef LocatePart(const StepReader& step, std::uint32_t layer,
                                              const StepLane& lane, const StepSequence& sequence,
                                              std::uint32_t part, VisibleRule rule) {
  const Positions visible = VisibleFromAll(sequence.first_query_position, sequence.queries, rule);
  if (part >= lane.segment_parts) return LocateTail(lane, sequence, visible);
  const StepSegment* segments = step.segments(lane);
  const StepSegment& segment = segments[FindSegment(segments, lane.segment_count, part)];
  const std::uint32_t first = (part - segment.first_part) * kSplitEntries;
  const std::uint32_t left = segment.entries - first;
  const std::uint32_t live = left < kSplitEntries ? left : kSplitEntries;
  PartRef located;
  located.base_position = segment.first_position + first;
  located.entries = VisibleEntries(located.base_position, {.begin = 0, .end = live}, visible);
  located.tile_table = segment.tile_table + std::uint64_t{first / kTileEntries} * 8;
  if (segment.strategy != kPlainSegment) {
    ApplyStrategy(step.strategy(layer, segment.strategy), segment, live, visible, located);
  }
  return located;
}

// What a query sees of a part: a range of entries, or of position words if the part has them. The
// largest position word, 2^32 - 1, is never visible.
TESSERA_HOST_DEVICE constexpr EntryRange VisibleOfPart(const PartRef& part, Positions visible) {
  return VisibleEntries(part.base_position,
                        part.positions ? EntryRange{.begin = 0, .end = ~0u} : part.entries,
                        visible);
}

// Query rows are the columns of a lane's attention: column c is query c / group, head c % group.
TESSERA_HOST_DEVICE constexpr std::uint32_t QueryOfColumn(std::uint32_t column,
                                                          std::uint32_t group) {
  return column / group;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t HeadOfColumn(std::uint32_t column, std::uint32_t group,
                                                         std::uint32_t kv_head) {
  return kv_head * group + column % group;
}

}  // namespace tessera::kernels::cuda
