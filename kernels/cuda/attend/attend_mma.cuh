// bf16 and fp16 attention over one part of a lane, on tensor cores.
//
// A block takes work items (a part of a lane, with all query rows of its kv head, up to 8 or 16 at
// a time) in a grid-stride loop. Each warp walks every kTuning.warps-th slice of 16 entries: it
// copies slices to shared memory ahead of use, scores them, and accumulates its own online softmax
// without synchronising with other warps. At the end of the part the warps' results are merged in
// warp order and stored for the merge kernel. So the bits of a result depend on the part alone.
//
// Rows that no query of the call sees are never read. Zeros replace them, because 0 x NaN would be
// NaN.
//
// Dense tiles with weights or positions have a separate variant (Shape::kWords), and so have parts
// of selected blocks, so plain tiles do not pay for either.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/slices.cuh"
#include "kernels/cuda/common/work.cuh"
#include "kernels/cuda/select/selected_parts.cuh"

namespace tessera::kernels::cuda {

// Loads the B operands of all steps: two channels of a query row per register, zeros after the last
// row.
template <class Shape>
TESSERA_DEVICE void LoadQuery(const AttendParams& params, const StepSequence& sequence,
                              const Work& work, std::uint32_t first_column,
                              MmaState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    const std::uint32_t column = first_column + t * kTileColumns + OperandBColumn(gpu::Lane());
    const bool live = column < sequence.queries * params.group;
    const std::byte* row = live ? QueryRowOf(params, sequence, work.kv_head, column, 2) : nullptr;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 2; ++i) {
        const std::uint32_t channel = s * 16 + OperandBRow(gpu::Lane(), i);
        state.query[t][s][i] =
            live ? *reinterpret_cast<const std::uint32_t*>(row + channel * 2) : 0;
      }
    }
  }
}

// Starts copying K and V of 16 entries, from `entry` on.
template <class Shape>
TESSERA_DEVICE void FetchSlice(const AttendParams& params, const PartTiles& tiles, EntryRange live,
                               std::uint32_t entry, std::byte* shared) {
  const DenseTile layout = {.head_dim = Shape::kHeadDim, .type = ElementType::kBf16};
  const std::byte* tile = tiles.Address(entry / kTileEntries);
  const std::uint32_t tile_row = entry % kTileEntries;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kSliceEntries * Shape::kRowChunks / kWarp; ++i) {
    const std::uint32_t piece = i * kWarp + gpu::Lane();
    const std::uint32_t row = piece / Shape::kRowChunks;
    const std::uint32_t chunk = piece % Shape::kRowChunks;
    const bool read = live.Contains(entry + row);
    const std::byte* source = tile + (tile_row + row) * Shape::kRowBytes + chunk * kChunkBytes;
    std::byte* place = shared + SwizzledOffset(row, chunk, Shape::kRowBytes);
    // A source that is not read must still be a valid address, so pass the step image.
    gpu::CopyChunk(place, read ? source : params.step, read);
    gpu::CopyChunk(place + Shape::kSliceBytes, read ? source + layout.value_offset(0) : params.step,
                   read);
  }
}

// Fetches 16 scattered rows of a selected part.
template <class Shape>
TESSERA_DEVICE void FetchSlice(const AttendParams& params, const SelectedRows& rows,
                               std::uint32_t entry, std::byte* shared) {
  const DenseTile layout = {.head_dim = Shape::kHeadDim, .type = ElementType::kBf16};
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kSliceEntries * Shape::kRowChunks / kWarp; ++i) {
    const std::uint32_t piece = i * kWarp + gpu::Lane();
    const std::uint32_t row = piece / Shape::kRowChunks;
    const std::uint32_t chunk = piece % Shape::kRowChunks;
    const bool read = rows.Live(entry + row);
    const std::byte* source = read ? rows.TileOf(entry + row) +
                                         rows.RowOf(entry + row) * Shape::kRowBytes +
                                         chunk * kChunkBytes
                                   : nullptr;
    std::byte* place = shared + SwizzledOffset(row, chunk, Shape::kRowBytes);
    gpu::CopyChunk(place, read ? source : params.step, read);
    gpu::CopyChunk(place + Shape::kSliceBytes, read ? source + layout.value_offset(0) : params.step,
                   read);
  }
}

// scores[t]: 16 entries x 8 columns, raw products.
template <ElementType kType, class Shape>
TESSERA_DEVICE void ScoreSlice(const std::byte* keys, const MmaState<Shape>& state,
                               float (&scores)[Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) scores[t][i] = 0;
  }
  const std::uint32_t entry = KeyMatrixEntry(gpu::Lane());
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t key[4];
    const std::uint32_t chunk = s * 2 + KeyMatrixChunk(gpu::Lane());
    gpu::LoadMatrices(key, keys + SwizzledOffset(entry, chunk, Shape::kRowBytes));
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<kType>(scores[t], key, state.query[t][s]);
    }
  }
}

// Like MaskRows for plain tiles: each entry is its own place, and every entry that a column sees
// is live.
template <class Shape>
TESSERA_DEVICE void MaskPlainRows(const AttendParams& params, std::uint32_t entry, std::uint32_t t,
                                  const MmaState<Shape>& state, float (&scores)[4]) {
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) {
    const bool seen = state.visible[t][i % 2].Contains(entry + AccumulatorRow(gpu::Lane(), i));
    scores[i] = seen ? LogitOf(params, scores[i]) : gpu::NegativeInfinity();
  }
}

// `rows`: the part's live entries, or its SelectedRows.
template <ElementType kType, class Shape, class Rows>
TESSERA_DEVICE void AttendSlice(const AttendParams& params, const std::byte* slice,
                                const Rows& rows, std::uint32_t entry, const TileWords& words,
                                MmaState<Shape>& state) {
  float scores[Shape::kColumnTiles][4];
  ScoreSlice<kType, Shape>(slice, state, scores);
  RowFacts facts;
  if constexpr (Shape::kWords) {
    facts = ReadFacts(rows, entry, words, slice + 2 * Shape::kSliceBytes);
  }
  std::uint32_t weights[Shape::kColumnTiles][2];
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    if constexpr (Shape::kWords) {
      MaskRows<Shape>(params, facts, t, state, scores[t]);
    } else {
      MaskPlainRows<Shape>(params, entry, t, state, scores[t]);
    }
    AddLogits<kType, Shape>(t, state, scores[t]);
    TransposeWeights<kType>(scores[t], weights[t]);
  }
  const std::byte* values = slice + Shape::kSliceBytes;
  const std::uint32_t row = ValueMatrixEntry(gpu::Lane());
  TESSERA_UNROLL
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t value[4];
    const std::uint32_t chunk = s * 2 + ValueMatrixChunk(gpu::Lane());
    gpu::LoadMatricesTransposed(value, values + SwizzledOffset(row, chunk, Shape::kRowBytes));
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      gpu::Mma<kType>(state.output[t][s], value, weights[t]);
    }
  }
}

// Walks this warp's slices of the part, with kTuning.stages - 1 slices in flight.
template <ElementType kType, class Shape>
TESSERA_DEVICE void AttendSlices(const AttendParams& params, const PartTiles& tiles,
                                 EntryRange live, const TileWords& words, std::byte* shared,
                                 MmaState<Shape>& state) {
  constexpr std::uint32_t kAhead = Shape::kTuning.stages - 1;
  const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
    FetchSlice<Shape>(params, tiles, live, entry, stage);
    if constexpr (Shape::kWords) {
      FetchWords(tiles.Address(entry / kTileEntries), entry % kTileEntries, words,
                 stage + 2 * Shape::kSliceBytes);
    }
  };
  const auto attend = [&](std::uint32_t entry, const std::byte* stage) {
    AttendSlice<kType, Shape>(params, stage, live, entry, words, state);
  };
  WalkSlices<kAhead, Shape::kStageEntries>(
      live, {.shared = shared, .stage_bytes = Shape::kStageBytes, .ahead = kAhead}, fetch, attend);
}

// The same for a selected part.
template <ElementType kType, class Shape>
TESSERA_DEVICE void AttendSlices(const AttendParams& params, const SelectedRows& rows,
                                 const TileWords& words, std::byte* shared,
                                 MmaState<Shape>& state) {
  constexpr std::uint32_t kAhead = Shape::kTuning.stages - 1;
  const auto fetch = [&](std::uint32_t entry, std::byte* stage) {
    FetchSlice<Shape>(params, rows, entry, stage);
    FetchWords(rows, entry, words, stage + 2 * Shape::kSliceBytes);
  };
  const auto attend = [&](std::uint32_t entry, const std::byte* stage) {
    AttendSlice<kType, Shape>(params, stage, rows, entry, words, state);
  };
  WalkSlices<kAhead, Shape::kStageEntries>(
      rows.range(), {.shared = shared, .stage_bytes = Shape::kStageBytes, .ahead = kAhead}, fetch,
      attend);
}

// Merges the warps' results. Block-collective.
template <ElementType kType, class Shape>
TESSERA_DEVICE void EndMmaPart(const AttendParams& params, const StepSequence& sequence,
                               const Work& work, std::uint32_t first_column,
                               const MmaState<Shape>& state, std::byte* shared) {
  StoreWarpResult<kType, Shape>(state, shared, [](std::uint32_t s, std::uint32_t i) {
    return s * 16 + AccumulatorRow(gpu::Lane(), i);
  });
  gpu::SyncBlock();
  StoreResult<Shape>(params, sequence, work, first_column, shared);
  gpu::SyncBlock();
}

// Kernel body. blockIdx.y selects the columns.
template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles,
          bool kWords = false>
TESSERA_DEVICE void AttendMma(const AttendParams& params) {
  using Shape = MmaShape<kHeadDim, kColumnTiles, kWords>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  constexpr DenseTile kTile = {.head_dim = kHeadDim, .type = kType};
  for (std::uint32_t index = gpu::BlockX(); index < works; index += gpu::GridX()) {
    const Work work = LocateWork(params, step, index);
    if (work.part.kind != (kWords ? PartKind::kDenseWords : PartKind::kDense)) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    PartTiles tiles;
    const bool found =
        tiles.Find(step.arena(), work.part, TileBytesOf(params, step, work.part, kTile.bytes()));
    ReportWork(params, sequence, work, found);
    TileWords words;
    if constexpr (kWords) words = WordsOf(step.strategy(params.layer, work.part.strategy));
    MmaState<Shape> state;
    ClearState<Shape>(params, sequence, work, first_column, state);
    LoadQuery<Shape>(params, sequence, work, first_column, state);
    // Warps may disagree on `found`; none may skip the barriers below.
    AttendSlices<kType, Shape>(params, tiles, found ? work.part.entries : EntryRange{}, words,
                               shared + gpu::Warp() * Shape::kWarpBytes, state);
    EndMmaPart<kType, Shape>(params, sequence, work, first_column, state, shared);
  }
}

// The same kernel for parts of selected dense blocks. Runs after the selection.
template <ElementType kType, std::uint32_t kHeadDim, std::uint32_t kColumnTiles>
TESSERA_DEVICE void AttendMmaSelected(const AttendParams& params) {
  using Shape = MmaShape<kHeadDim, kColumnTiles, true>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t slots = CountSlots(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  for (std::uint32_t index = gpu::BlockX(); index < slots; index += gpu::GridX()) {
    const SelectedWork selected = LocateSelected(params, step, index);
    const Work& work = selected.work;
    if (selected.count == 0 || work.part.kind != PartKind::kDenseWords) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    SelectedRows rows(selected, shared + SelectedShape<Shape>::kTableOffset);
    const bool found = rows.Find(step.arena(), selected, TileBytesOf(params, step, work.part, 0));
    ReportSelected(params, sequence, work, found);
    MmaState<Shape> state;
    ClearState<Shape>(params, sequence, work, first_column, state);
    LoadQuery<Shape>(params, sequence, work, first_column, state);
    AttendSlices<kType, Shape>(params, rows,
                               WordsOf(step.strategy(params.layer, work.part.strategy)),
                               shared + gpu::Warp() * Shape::kWarpBytes, state);
    EndMmaPart<kType, Shape>(params, sequence, work, first_column, state, shared);
  }
}

}  // namespace tessera::kernels::cuda
