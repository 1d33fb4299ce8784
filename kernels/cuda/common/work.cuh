// From a work item to the tiles that a block reads. Every attention kernel starts here.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/common/step_view.h"

namespace tessera::kernels::cuda {

// Returns the lane that owns a work item: the largest i with works[i] <= work. Warp-collective: 32
// probes at a time. Requires work < works[lanes].
TESSERA_DEVICE std::uint32_t FindLane(const std::uint32_t* works, std::uint32_t lanes,
                                      std::uint32_t work) {
  std::uint32_t low = 0;
  std::uint32_t high = lanes;
  while (high - low > 1) {
    const std::uint32_t stride = (high - low + kWarp - 1) / kWarp;
    const std::uint32_t probe = low + gpu::Lane() * stride;
    // The passing probes are a prefix, and at least one passes.
    const std::uint32_t passed = gpu::Ballot(probe < high && works[probe] <= work);
    low += (gpu::PopCount(passed) - 1) * stride;
    if (high - low > stride) high = low + stride;
  }
  return low;
}

// Lane t of a warp: reads word t of a tile table and returns the address that it refers to, or 0 if
// that lies outside the pool. The table may be recycled memory under a revoked reader, so each word
// is read once, and the value that was checked is the value that is used.
TESSERA_DEVICE std::uint64_t ResolveTableEntry(const DeviceArena& arena, std::uint64_t table,
                                               std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t entry = ResolveObject(arena, table + gpu::Lane() * sizeof(std::uint64_t),
                                            sizeof(std::uint64_t), sizeof(std::uint64_t));
  if (entry == 0) return 0;
  const std::uint64_t offset = gpu::LoadOnce(reinterpret_cast<const std::uint64_t*>(entry));
  return ResolveObject(arena, offset, bytes, alignment);
}

// Locates the tiles of a part. For a segment, lane t of each warp holds the address of tile t.
// Every warp reads the table itself, so warps need no exchange.
class PartTiles {
 public:
  // Returns false if a tile lies outside the pool or `tile_bytes` is 0. Warps may get different
  // results.
  TESSERA_DEVICE bool Find(const DeviceArena& arena, const PartRef& part,
                           std::uint32_t tile_bytes) {
    tile_bytes_ = tile_bytes;
    ring_ = part.ring;
    ring_tiles_ = part.ring_tiles;
    ring_slot_ = part.ring_slot;
    tail_ = part.tail;
    if (tail_ || part.entries.empty()) return true;
    if (tile_bytes == 0) return false;
    const std::uint32_t first = part.entries.begin / kTileEntries;
    const std::uint32_t last = (part.entries.end - 1) / kTileEntries;
    bool bad = false;
    if (gpu::Lane() >= first && gpu::Lane() <= last) {
      tile_ = ResolveTableEntry(arena, part.tile_table, tile_bytes, kTileAlignment);
      bad = tile_ == 0;
    }
    return gpu::Ballot(bad) == 0;
  }

  // Returns the address of the part's tile `tile`. Warp-collective: all lanes pass the same tile.
  TESSERA_DEVICE const std::byte* Address(std::uint32_t tile) const {
    const std::uint64_t address =
        tail_ ? ring_ + std::uint64_t{(ring_slot_ + tile) % ring_tiles_} * tile_bytes_
              : gpu::Shuffle(tile_, tile);
    return reinterpret_cast<const std::byte*>(address);
  }

 private:
  std::uint64_t tile_ = 0;
  std::uint64_t ring_ = 0;
  std::uint32_t ring_tiles_ = 0;
  std::uint32_t ring_slot_ = 0;
  std::uint32_t tile_bytes_ = 0;
  bool tail_ = false;
};

// One work item of a layer, as a block of threads sees it.
struct Work {
  std::uint32_t index = 0;  // index in the layer, also of its partial result
  std::uint32_t lane = 0;
  std::uint32_t kv_head = 0;
  PartRef part;
};

// Reports a fault of the work item's lane. Called by one thread of a block.
TESSERA_DEVICE void Report(const AttendParams& params, FaultKind kind, const Work& work) {
  gpu::AtomicMin(params.fault, FaultWord::Pack(kind, params.layer, work.lane));
}

// The optional per-entry words of a part's tiles, and their offsets.
struct TileWords {
  bool weights = false;
  bool positions = false;
  std::uint32_t weights_at = 0;  // from the tile's first byte
  std::uint32_t positions_at = 0;
};

TESSERA_DEVICE TileWords WordsOf(const StepStrategy& strategy) {
  return {.weights = strategy.shape.weights,
          .positions = strategy.shape.positions,
          .weights_at = strategy.layout.weights,
          .positions_at = strategy.layout.positions};
}

// Reports the problems that a block found in a work item. `found`: this warp's tiles are in the
// pool.
TESSERA_DEVICE void ReportWork(const AttendParams& params, const StepSequence& sequence,
                               const Work& work, bool found) {
  if (!found && gpu::Lane() == 0) Report(params, FaultKind::kBadTile, work);
  if (!work.part.sound && gpu::Thread() == 0) Report(params, FaultKind::kBadTail, work);
  if (sequence.queries * params.group > params.max_columns && gpu::Thread() == 0) {
    Report(params, FaultKind::kBadStep, work);
  }
}

// Bytes per tile of the part. Returns 0 if the head_dim of its strategy differs from the launch's,
// so that Find fails.
TESSERA_DEVICE std::uint32_t TileBytesOf(const AttendParams& params, const StepReader& step,
                                         const PartRef& part, std::uint32_t plain_bytes) {
  if (part.strategy == kPlainSegment) return plain_bytes;
  const StepStrategy& strategy = step.strategy(params.layer, part.strategy);
  return strategy.shape.head_dim == params.head_dim ? strategy.layout.bytes : 0;
}

// Warp-collective.
TESSERA_DEVICE Work LocateWork(const AttendParams& params, const StepReader& step,
                               std::uint32_t index) {
  Work work;
  work.index = index;
  const std::uint32_t* works = step.works(params.layer);
  work.lane = FindLane(works, step.lanes(params.layer), index);
  const std::uint32_t kv_heads = step.layer(params.layer).kv_heads;
  work.kv_head = work.lane % kv_heads;
  StepSequence sequence = step.sequence(work.lane / kv_heads);
  if (params.appended == 0) sequence.appended = 0;
  work.part =
      LocatePart(step, params.layer, step.lane(params.layer, work.lane), sequence,
                 index - works[work.lane], {.causal = params.causal != 0, .window = params.window});
  return work;
}

TESSERA_DEVICE bool ServesSelections(const AttendParams& params, const StepReader& step) {
  const StepLayer& layer = step.layer(params.layer);
  if (layer.selections == 0) return true;
  return layer.selections <= params.max_selections && layer.choices <= params.max_choices &&
         layer.blocks <= params.max_blocks &&
         step.pieces(params.layer)[layer.selections] <= params.max_pieces &&
         step.slots(params.layer)[layer.selections] <= params.max_slots &&
         (layer.selected_kinds & ~params.selected_kinds) == 0 &&
         (layer.summaries & ~params.summaries) == 0;
}

// Returns true if a launch with these limits and this geometry can handle the image.
TESSERA_DEVICE bool Serves(const AttendParams& params, const StepReader& step) {
  return step.Holds(params.layer) && step.header().batch <= params.max_batch &&
         step.layer(params.layer).kv_heads * params.group == params.query_heads &&
         step.works(params.layer)[step.lanes(params.layer)] <= params.max_works &&
         step.layer(params.layer).strategies <= params.max_strategies &&
         (step.layer(params.layer).kinds & ~params.kinds) == 0 && ServesSelections(params, step);
}

TESSERA_DEVICE bool ServesOrReports(const AttendParams& params, const StepReader& step) {
  if (Serves(params, step)) return true;
  if (gpu::Thread() == 0) {
    gpu::AtomicMin(params.fault, FaultWord::Pack(FaultKind::kBadStep, params.layer, 0));
  }
  return false;
}

// Number of work items of the layer. Reports a fault and returns 0 if the launch cannot handle the
// image.
TESSERA_DEVICE std::uint32_t CountWorks(const AttendParams& params, const StepReader& step) {
  return ServesOrReports(params, step) ? step.works(params.layer)[step.lanes(params.layer)] : 0;
}

// The logit in log2 units of a product times logit_scale, saturated to the finite range. An
// overflowed product then wins the softmax instead of making the sum NaN. NaN is passed on.
TESSERA_DEVICE float BoundLogit(const AttendParams& params, float scaled) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float logit = params.logit_cap > 0 ? params.logit_cap * gpu::Tanh(scaled) : scaled;
  return logit > kLargest ? kLargest : (logit < -kLargest ? -kLargest : logit);
}
TESSERA_DEVICE float LogitOf(const AttendParams& params, float product) {
  return BoundLogit(params, product * params.logit_scale);
}

// The entries of a part that the query of a column sees, as VisibleOfPart defines them. Empty for
// columns after the last one.
TESSERA_DEVICE EntryRange VisibleToColumn(const AttendParams& params, const StepSequence& sequence,
                                          const PartRef& part, std::uint32_t column) {
  if (column >= sequence.queries * params.group) return {};
  const std::uint64_t position =
      sequence.first_query_position + QueryOfColumn(column, params.group);
  return VisibleOfPart(
      part, VisibleFrom(position, {.causal = params.causal != 0, .window = params.window}));
}

// Address of the query row of a column.
TESSERA_DEVICE const std::byte* QueryRowOf(const AttendParams& params, const StepSequence& sequence,
                                           std::uint32_t kv_head, std::uint32_t column,
                                           std::uint32_t element_bytes) {
  const std::uint64_t row =
      sequence.first_query_row + std::uint64_t{QueryOfColumn(column, params.group)};
  const std::uint32_t head = HeadOfColumn(column, params.group, kv_head);
  return params.query +
         (row * params.query_stride + std::uint64_t{head} * params.head_dim) * element_bytes;
}

}  // namespace tessera::kernels::cuda
