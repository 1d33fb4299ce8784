// fp32 attention over one part of a lane, by fused multiply-adds, because tensor cores would round
// the operands. Work items and partial results are those of attend_mma.cuh. The whole block walks
// the part tile by tile. For the scores, a lane handles one entry and a warp two columns; for the
// output, a thread handles one channel. kWords adds weights and positions. In a selected part, 32
// rows of its blocks take the place of a tile.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/work.cuh"
#include "kernels/cuda/select/selected_parts.cuh"

namespace tessera::kernels::cuda {

template <class Shape>
struct FmaState {
  EntryRange visible[Shape::kWarpColumns];  // per column of the warp
  float maximum[Shape::kWarpColumns];
  float sum[Shape::kWarpColumns];  // sum over this lane's entries only, until the part ends
  float output[Shape::kTurns][Shape::kGroupColumns];
};

// The channel, and the first column, that this thread accumulates.
template <class Shape>
TESSERA_DEVICE std::uint32_t ChannelOf(std::uint32_t turn) {
  return turn * Shape::kThreads + gpu::Thread() % Shape::kHeadDim;
}
template <class Shape>
TESSERA_DEVICE std::uint32_t FirstColumnOf() {
  return gpu::Thread() / Shape::kHeadDim % Shape::kColumnGroups * Shape::kGroupColumns;
}

template <class Shape>
TESSERA_DEVICE void BeginFmaPart(const AttendParams& params, const StepSequence& sequence,
                                 const Work& work, std::uint32_t first_column, std::byte* shared,
                                 FmaState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < Shape::kWarpColumns; ++c) {
    state.visible[c] = VisibleToColumn(params, sequence, work.part,
                                       first_column + gpu::Warp() * Shape::kWarpColumns + c);
    state.maximum[c] = gpu::NegativeInfinity();
    state.sum[c] = 0;
  }
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kTurns; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < Shape::kGroupColumns; ++c) state.output[t][c] = 0;
  }
  auto* query = reinterpret_cast<float*>(shared + Shape::kQueryOffset);
  for (std::uint32_t i = gpu::Thread(); i < Shape::kColumns * Shape::kHeadDim;
       i += Shape::kThreads) {
    const std::uint32_t column = first_column + i / Shape::kHeadDim;
    const bool live = column < sequence.queries * params.group;
    query[i] = live ? reinterpret_cast<const float*>(QueryRowOf(params, sequence, work.kv_head,
                                                                column, 4))[i % Shape::kHeadDim]
                    : 0;
  }
}

template <class Shape>
TESSERA_DEVICE void FetchTile(const AttendParams& params, const PartTiles& tiles, EntryRange live,
                              std::uint32_t tile_index, std::byte* shared) {
  const std::byte* tile = tiles.Address(tile_index);
  for (std::uint32_t piece = gpu::Thread(); piece < Shape::kTileRows * Shape::kRowChunks;
       piece += Shape::kThreads) {
    const std::uint32_t row = piece / Shape::kRowChunks;
    const std::uint32_t chunk = piece % Shape::kRowChunks;
    const bool read = live.Contains(tile_index * kTileEntries + row);
    const std::byte* source = tile + row * Shape::kRowBytes + chunk * kChunkBytes;
    std::byte* place = shared + SwizzledOffset(row, chunk, Shape::kRowBytes);
    gpu::CopyChunk(place, read ? source : params.step, read);
    gpu::CopyChunk(place + Shape::kHalfBytes, read ? source + Shape::kHalfBytes : params.step,
                   read);
  }
}

// Fetches 32 scattered rows of a selected part.
template <class Shape>
TESSERA_DEVICE void FetchTile(const AttendParams& params, const SelectedRows& rows,
                              std::uint32_t tile_index, std::byte* shared) {
  for (std::uint32_t piece = gpu::Thread(); piece < Shape::kTileRows * Shape::kRowChunks;
       piece += Shape::kThreads) {
    const std::uint32_t row = piece / Shape::kRowChunks;
    const std::uint32_t chunk = piece % Shape::kRowChunks;
    const std::uint32_t entry = tile_index * Shape::kTileRows + row;
    const bool read = rows.Live(entry);
    const std::byte* source =
        read ? rows.TileOf(entry) + rows.RowOf(entry) * Shape::kRowBytes + chunk * kChunkBytes
             : nullptr;
    std::byte* place = shared + SwizzledOffset(row, chunk, Shape::kRowBytes);
    gpu::CopyChunk(place, read ? source : params.step, read);
    gpu::CopyChunk(place + Shape::kHalfBytes, read ? source + Shape::kHalfBytes : params.step,
                   read);
  }
}

// What a lane needs to know about its entry of a tile.
struct EntryFacts {
  bool live = true;
  std::uint32_t place = 0;  // entry or position word that is compared with a column's visible range
  float bias = 0;           // log2 of the weight
};

template <bool kWords>
TESSERA_DEVICE EntryFacts FactsOfEntry(const PartTiles& tiles, const TileWords& words,
                                       EntryRange live, std::uint32_t tile_index) {
  const std::uint32_t entry = tile_index * kTileEntries + gpu::Lane();
  EntryFacts facts = {.place = entry};
  if constexpr (kWords) {
    const std::byte* tile = tiles.Address(tile_index);
    facts.live = live.Contains(entry);
    if (facts.live && words.positions) {
      facts.place = reinterpret_cast<const std::uint32_t*>(tile + words.positions_at)[gpu::Lane()];
    }
    if (facts.live && words.weights) {
      facts.bias = gpu::Log2(reinterpret_cast<const float*>(tile + words.weights_at)[gpu::Lane()]);
    }
  }
  return facts;
}

TESSERA_DEVICE EntryFacts FactsOfEntry(const SelectedRows& rows, const TileWords& words,
                                       std::uint32_t tile_index) {
  const std::uint32_t entry = tile_index * kTileEntries + gpu::Lane();
  EntryFacts facts = {.live = rows.Live(entry), .place = rows.EntryOf(entry)};
  if (!facts.live) return facts;
  const std::byte* tile = rows.TileOf(entry);
  const std::uint32_t row = rows.RowOf(entry);
  if (words.positions) {
    facts.place = reinterpret_cast<const std::uint32_t*>(tile + words.positions_at)[row];
  }
  if (words.weights) {
    facts.bias = gpu::Log2(reinterpret_cast<const float*>(tile + words.weights_at)[row]);
  }
  return facts;
}

// Computes the weights [column][entry] of a tile, and each column's factor for the output
// accumulated so far.
template <class Shape>
TESSERA_DEVICE void WeighTile(const AttendParams& params, const EntryFacts& facts,
                              const std::byte* stage, std::byte* shared, FmaState<Shape>& state) {
  auto* weights = reinterpret_cast<float*>(shared + Shape::kWeightsOffset);
  auto* factors = reinterpret_cast<float*>(shared + Shape::kFactorOffset);
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < Shape::kWarpColumns; ++c) {
    const std::uint32_t column = gpu::Warp() * Shape::kWarpColumns + c;
    const auto* query =
        reinterpret_cast<const float*>(shared + Shape::kQueryOffset) + column * Shape::kHeadDim;
    float product = 0;
    for (std::uint32_t chunk = 0; chunk < Shape::kRowChunks; ++chunk) {
      const auto* key = reinterpret_cast<const float*>(
          stage + SwizzledOffset(gpu::Lane(), chunk, Shape::kRowBytes));
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) product += key[i] * query[chunk * 4 + i];
    }
    const bool seen = facts.live && state.visible[c].Contains(facts.place);
    const float logit = seen ? LogitOf(params, product) + facts.bias : gpu::NegativeInfinity();
    float next = logit;
    TESSERA_UNROLL
    for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
      next = gpu::Max(next, gpu::ShuffleXor(next, mask));
    }
    next = gpu::Max(next, state.maximum[c]);
    const float reference = next == gpu::NegativeInfinity() ? 0 : next;
    const float factor = gpu::Exp2(state.maximum[c] - reference);
    const float weight = gpu::Exp2(logit - reference);
    state.sum[c] = state.sum[c] * factor + weight;
    state.maximum[c] = next;
    weights[column * Shape::kTileRows + gpu::Lane()] = weight;
    if (gpu::Lane() == 0) factors[column] = factor;
  }
}

template <class Shape>
TESSERA_DEVICE void AccumulateTile(const std::byte* stage, const std::byte* shared,
                                   FmaState<Shape>& state) {
  const auto* weights = reinterpret_cast<const float*>(shared + Shape::kWeightsOffset);
  const auto* factors = reinterpret_cast<const float*>(shared + Shape::kFactorOffset);
  const std::uint32_t column = FirstColumnOf<Shape>();
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kTurns; ++t) {
    const std::uint32_t channel = ChannelOf<Shape>(t);
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < Shape::kGroupColumns; ++c) {
      state.output[t][c] *= factors[column + c];
    }
    for (std::uint32_t row = 0; row < Shape::kTileRows; ++row) {
      const std::byte* chunk =
          stage + Shape::kHalfBytes + SwizzledOffset(row, channel / 4, Shape::kRowBytes);
      const float value = reinterpret_cast<const float*>(chunk)[channel % 4];
      TESSERA_UNROLL
      for (std::uint32_t c = 0; c < Shape::kGroupColumns; ++c) {
        state.output[t][c] += weights[(column + c) * Shape::kTileRows + row] * value;
      }
    }
  }
}

// fetch_tile(tile, stage) starts the copies of a tile; facts_of(tile) describes the lane's entry of
// it.
template <class Shape, class FetchOne, class FactsOf>
TESSERA_DEVICE void AttendTiles(const AttendParams& params, EntryRange live, FetchOne fetch_tile,
                                FactsOf facts_of, std::byte* shared, FmaState<Shape>& state) {
  constexpr std::uint32_t kStages = Shape::kTuning.stages;
  const std::uint32_t first = live.begin / kTileEntries;
  const std::uint32_t last = live.empty() ? first : (live.end - 1) / kTileEntries + 1;
  const auto fetch = [&](std::uint32_t tile) {
    if (tile < last) {
      fetch_tile(tile, shared + (tile - first) % kStages * Shape::kStageBytes);
    }
    gpu::CommitCopies();
  };
  for (std::uint32_t i = 0; i + 1 < kStages; ++i) fetch(first + i);
  for (std::uint32_t tile = first; tile < last; ++tile) {
    fetch(tile + kStages - 1);
    gpu::WaitCopies<kStages - 1>();
    gpu::SyncBlock();
    const std::byte* stage = shared + (tile - first) % kStages * Shape::kStageBytes;
    WeighTile<Shape>(params, facts_of(tile), stage, shared, state);
    gpu::SyncBlock();
    AccumulateTile<Shape>(stage, shared, state);
    gpu::SyncBlock();
  }
  gpu::WaitCopies<0>();
}

template <class Shape>
TESSERA_DEVICE void StoreFmaResult(const AttendParams& params, const StepSequence& sequence,
                                   const Work& work, std::uint32_t first_column,
                                   const FmaState<Shape>& state) {
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t limit = columns < params.max_columns ? columns : params.max_columns;
  const std::uint64_t slots = std::uint64_t{work.index} * params.max_columns;
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < Shape::kWarpColumns; ++c) {
    float sum = state.sum[c];
    TESSERA_UNROLL
    for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) sum += gpu::ShuffleXor(sum, mask);
    const std::uint32_t column = first_column + gpu::Warp() * Shape::kWarpColumns + c;
    if (gpu::Lane() == 0 && column < limit) {
      params.states[(slots + column) * 2] = state.maximum[c];
      params.states[(slots + column) * 2 + 1] = sum;
    }
  }
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kTurns; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < Shape::kGroupColumns; ++c) {
      const std::uint32_t column = first_column + FirstColumnOf<Shape>() + c;
      if (column < limit) {
        params.outputs[(slots + column) * Shape::kHeadDim + ChannelOf<Shape>(t)] =
            state.output[t][c];
      }
    }
  }
}

// Kernel body. blockIdx.y selects the columns.
template <std::uint32_t kHeadDim, bool kWords = false>
TESSERA_DEVICE void AttendFma(const AttendParams& params) {
  using Shape = FmaShape<kHeadDim>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t works = CountWorks(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  constexpr DenseTile kTile = {.head_dim = kHeadDim, .type = ElementType::kFp32};
  static_assert(kTile.value_offset(0) == Shape::kHalfBytes);
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
    FmaState<Shape> state;
    BeginFmaPart<Shape>(params, sequence, work, first_column, shared, state);
    // The first tile's barrier makes the query visible to all threads. Warps may disagree on
    // `found`. None may skip a barrier, so `found` only changes which entries they read.
    const EntryRange mine = found ? work.part.entries : EntryRange{};
    AttendTiles<Shape>(
        params, work.part.entries,
        [&](std::uint32_t tile, std::byte* stage) {
          FetchTile<Shape>(params, tiles, mine, tile, stage);
        },
        [&](std::uint32_t tile) { return FactsOfEntry<kWords>(tiles, words, mine, tile); }, shared,
        state);
    // Reads registers only: shared memory is free since the last tile's barrier.
    StoreFmaResult<Shape>(params, sequence, work, first_column, state);
  }
}

// The same kernel for parts of selected blocks. Runs after the selection.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void AttendFmaSelected(const AttendParams& params) {
  using Shape = FmaShape<kHeadDim>;
  const StepReader step(params.step);
  std::byte* shared = gpu::SharedMemory();
  const std::uint32_t slots = CountSlots(params, step);
  const std::uint32_t first_column = gpu::BlockY() * Shape::kColumns;
  for (std::uint32_t index = gpu::BlockX(); index < slots; index += gpu::GridX()) {
    const SelectedWork selected = LocateSelected(params, step, index);
    const Work& work = selected.work;
    if (selected.count == 0 || work.part.kind != PartKind::kDenseWords) continue;
    const StepSequence& sequence = step.sequence(work.lane / step.layer(params.layer).kv_heads);
    const TileWords words = WordsOf(step.strategy(params.layer, work.part.strategy));
    SelectedRows rows(selected, shared + SelectedShape<Shape>::kTableOffset);
    // Every thread has passed the last tile's barrier, so none still reads the old table.
    const bool found = rows.Find(step.arena(), selected, TileBytesOf(params, step, work.part, 0));
    ReportSelected(params, sequence, work, found);
    FmaState<Shape> state;
    BeginFmaPart<Shape>(params, sequence, work, first_column, shared, state);
    AttendTiles<Shape>(
        params, rows.range(),
        [&](std::uint32_t tile, std::byte* stage) { FetchTile<Shape>(params, rows, tile, stage); },
        [&](std::uint32_t tile) { return FactsOfEntry(rows, words, tile); }, shared, state);
    StoreFmaResult<Shape>(params, sequence, work, first_column, state);
  }
}

}  // namespace tessera::kernels::cuda
