// Attention over a part of selected quads. The same work as over whole tiles (attend_planes.cuh); a
// stage is eight quads from anywhere in the segment, which are copied as they are stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attend/attend_planes.cuh"
#include "kernels/cuda/select/selected_parts.cuh"

namespace tessera::kernels::cuda {

TESSERA_DEVICE bool IsLiveRow(const SelectedRows& rows, std::uint32_t entry) {
  return rows.Live(entry);
}
TESSERA_DEVICE std::uint32_t PlaceOfRow(const SelectedRows& rows, std::uint32_t entry) {
  return rows.EntryOf(entry);
}
// The list of quads rises, so the first and the last decide. Only the last may be partial.
TESSERA_DEVICE EntryRange WholeRows(const SelectedRows& rows, EntryRange seen) {
  std::uint32_t end = rows.range().end;
  if (rows.EntryOf(0) < seen.begin) return {};
  if (rows.EntryOf(end - 1) >= seen.end) end -= kQuadRows;
  if (end == 0 || rows.EntryOf(end - 1) >= seen.end) return {};
  return {.begin = 0, .end = end};
}

// Starts copying eight quads, four lanes each, and zeros for those that are not there.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void FetchQuads(const QuadPart& part, const SelectedRows& rows, std::uint32_t entry,
                               std::byte* stage) {
  constexpr std::uint32_t kLanes = kWarp / kTileQuads;
  constexpr std::uint32_t kRound = kLanes * kChunkBytes;
  constexpr std::uint32_t kMost = QuadLayoutOf(kHeadDim, {8, 8}, {8, 8}).bytes;
  const std::uint32_t index = gpu::Lane() / kLanes;
  const SelectedBlock& own = rows.BlockOf(entry + index * kQuadRows);
  const bool live = own.tile != 0;
  // A source that is not read must still be a valid address: that of the part's first quad.
  const SelectedBlock& block = live ? own : rows.BlockOf(0);
  if (block.tile == 0) return;  // Find has reported it
  const std::uint32_t first = gpu::Lane() % kLanes * kChunkBytes;
  const std::byte* quad = reinterpret_cast<const std::byte*>(block.tile) +
                          block.row / kQuadRows * part.quad_bytes + first;
  std::byte* to = stage + index * part.quad_bytes + first;
  TESSERA_UNROLL
  for (std::uint32_t at = 0; at < kMost; at += kRound) {
    if (at + kRound <= part.quad_bytes || at + first < part.quad_bytes) {
      gpu::CopyChunk(to + at, quad + at, live);
    }
  }
}

// Starts copying the words of 32 rows, one a lane. Rows without a tile keep the old contents.
TESSERA_DEVICE void FetchQuadWords(const QuadPart& part, const SelectedRows& rows,
                                   std::uint32_t entry, std::byte* stage) {
  const std::uint32_t own = entry + gpu::Lane();
  const std::byte* tile = rows.TileOf(own);
  if (tile == nullptr) return;
  const std::uint32_t from = rows.RowOf(own) * 4;
  std::byte* to = stage + part.words_at() + gpu::Lane() * 4;
  if (part.words.weights) gpu::CopyWord(to, tile + part.words.weights_at + from);
  if (part.words.positions) {
    gpu::CopyWord(to + kTileEntries * 4, tile + part.words.positions_at + from);
  }
}

// Kernel body. blockIdx.y selects the columns. Runs after the selection.
template <std::uint32_t kHeadDim, std::uint32_t kColumnTiles, PartKind kKind>
TESSERA_DEVICE void AttendPlanesSelected(const AttendParams& params) {
  using Shape = QuadShape<kHeadDim, kColumnTiles>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t slots = CountSlots(params, step);
  for (std::uint32_t index = gpu::BlockX(); index < slots; index += gpu::GridX()) {
    const SelectedWork selected = LocateSelected(params, step, index);
    const Work& work = selected.work;
    if (selected.count == 0 || work.part.kind != kKind) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const StepStrategy& strategy = step.strategy(params.layer, work.part.strategy);
    SelectedRows rows(selected, shared + SelectedShape<Shape>::kTableOffset);
    const bool found = rows.Find(step.arena(), selected, TileBytesOf(params, step, work.part, 0));
    ReportSelected(params, sequence, work, found);
    const QuadPart part = QuadPartOf<kHeadDim, kKind>(strategy);
    const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
      FetchQuads<kHeadDim>(part, rows, entry, stage);
      if (part.words.weights || part.words.positions) FetchQuadWords(part, rows, entry, stage);
    };
    AttendQuadPart<Shape>(params, sequence, work, part, rows, rows.range(), work.part.entries,
                          fetch, shared);
  }
}

}  // namespace tessera::kernels::cuda
