// Defines which lane of a warp holds which element: the register layouts of mma.m16n8k16 and
// ldmatrix, and the layout of a slice in shared memory.
//
// K and V in shared memory are rows of entries, cut into 16-byte chunks. Chunk c of row r is stored
// at place c ^ (r % 8). This swizzle avoids bank conflicts: the eight rows that ldmatrix reads at
// once (same c, consecutive r) lie in different banks, and so do the eight chunks of 128 bytes of
// one row.
//
//   scores^T [entry][column]   = K [entry][channel] x query^T [channel][column]
//   output^T [channel][column] = V^T [channel][entry] x weights^T [entry][column]
//
// Both products have the query rows in N. So a thread's accumulators of both products belong to the
// same two columns, and it can rescale the output without exchanging data.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kChunkBytes = 16;

TESSERA_HOST_DEVICE constexpr std::uint32_t SwizzledOffset(std::uint32_t row, std::uint32_t chunk,
                                                           std::uint32_t row_bytes) {
  return row * row_bytes + (chunk ^ (row % 8)) * kChunkBytes;
}

// Row of element i (0..3) of a thread's accumulator.
TESSERA_HOST_DEVICE constexpr std::uint32_t AccumulatorRow(std::uint32_t lane, std::uint32_t i) {
  return lane / 4 + i / 2 * 8;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t AccumulatorColumn(std::uint32_t lane, std::uint32_t i) {
  return lane % 4 * 2 + i % 2;
}

// Register i (0, 1) of a thread's B operand holds rows k and k + 1 of one column.
TESSERA_HOST_DEVICE constexpr std::uint32_t OperandBRow(std::uint32_t lane, std::uint32_t i) {
  return lane % 4 * 2 + i * 8;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t OperandBColumn(std::uint32_t lane) { return lane / 4; }

// The row address that each lane passes to ldmatrix.x4: the entry within the slice, and the chunk
// (8 channels) counted from the first. The four matrices become the four registers of an A operand:
// rows 0-7 and 8-15 at k 0-7, then the same rows at k 8-15.
TESSERA_HOST_DEVICE constexpr std::uint32_t KeyMatrixEntry(std::uint32_t lane) { return lane % 16; }
TESSERA_HOST_DEVICE constexpr std::uint32_t KeyMatrixChunk(std::uint32_t lane) { return lane / 16; }
// For V the rows of A are channels and k is the entry. V is stored transposed to that, so it is
// read with ldmatrix.trans, and the second and third matrix are swapped.
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueMatrixEntry(std::uint32_t lane) {
  return lane / 16 * 8 + lane % 8;
}
TESSERA_HOST_DEVICE constexpr std::uint32_t ValueMatrixChunk(std::uint32_t lane) {
  return lane / 8 % 2;
}

// Bytes of a stage for the optional per-entry words of a tile: 16 weights, then 16 positions.
inline constexpr std::uint32_t kStageWordBytes = 2 * kSliceEntries * 4;

// Shape of one tensor-core attention kernel and its shared memory:
//   per warp   stages x (16 rows of K | 16 rows of V | with kWords: 16 weights, 16 positions)
//   then       maximum and sum per warp and column
// After its last slice a warp reuses its own stages for its output, [column][channel].
template <std::uint32_t kHeadDimValue, std::uint32_t kColumnTilesValue, bool kWordsValue = false>
struct MmaShape {
  static constexpr bool kWords = kWordsValue;
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr std::uint32_t kColumnTiles = kColumnTilesValue;
  static constexpr MmaTuning kTuning = MmaTuningFor(kHeadDim);
  static constexpr std::uint32_t kColumns = kColumnTiles * kTileColumns;
  static constexpr std::uint32_t kThreads = kTuning.warps * kWarp;
  static constexpr std::uint32_t kSteps = kHeadDim / 16;  // 16 channels per step
  static constexpr std::uint32_t kRowBytes = kHeadDim * 2;
  static constexpr std::uint32_t kRowChunks = kRowBytes / kChunkBytes;
  static constexpr std::uint32_t kSliceBytes = kSliceEntries * kRowBytes;  // K alone, or V alone
  static constexpr std::uint32_t kStageBytes = 2 * kSliceBytes + (kWords ? kStageWordBytes : 0);
  static constexpr std::uint32_t kWarpBytes = kTuning.stages * kStageBytes;
  static constexpr std::uint32_t kStageEntries = kTuning.warps * kSliceEntries;
  // Padded by four floats, so that the lanes of an accumulator write to 32 different banks.
  static constexpr std::uint32_t kOutputRow = kHeadDim + 4;
  static constexpr std::uint32_t kStateOffset = kTuning.warps * kWarpBytes;
  static constexpr std::uint32_t kSharedBytes = kStateOffset + kTuning.warps * kColumns * 2 * 4;
  static_assert(kColumns * kOutputRow * 4 <= kWarpBytes);
  static_assert(kRowChunks % 8 == 0 && kSliceEntries * kRowChunks % kWarp == 0);
};

// Shape of the fp32 kernel. It holds whole tiles in shared memory. One warp computes the scores of
// two columns; one thread accumulates one channel of the output.
//   stages x (32 rows of K | 32 rows of V) | query [8][head_dim] | weights [8][32] | factor [8]
template <std::uint32_t kHeadDimValue>
struct FmaShape {
  static constexpr std::uint32_t kHeadDim = kHeadDimValue;
  static constexpr FmaTuning kTuning = FmaTuningFor(kHeadDim);
  static constexpr std::uint32_t kColumns = 8;
  static constexpr std::uint32_t kThreads = kTuning.warps * kWarp;
  static constexpr std::uint32_t kWarpColumns = kColumns / kTuning.warps;
  static constexpr std::uint32_t kTileRows = 32;  // one entry per lane
  static constexpr std::uint32_t kRowBytes = kHeadDim * 4;
  static constexpr std::uint32_t kRowChunks = kRowBytes / kChunkBytes;
  static constexpr std::uint32_t kHalfBytes = kTileRows * kRowBytes;  // K alone, or V alone
  static constexpr std::uint32_t kStageBytes = 2 * kHalfBytes;
  // Threads beyond head_dim take other columns. If there are more channels than threads, each
  // thread takes several in turn.
  static constexpr std::uint32_t kColumnGroups = kThreads > kHeadDim ? kThreads / kHeadDim : 1;
  static constexpr std::uint32_t kGroupColumns = kColumns / kColumnGroups;
  static constexpr std::uint32_t kTurns = kHeadDim > kThreads ? kHeadDim / kThreads : 1;
  static constexpr std::uint32_t kQueryOffset = kTuning.stages * kStageBytes;
  static constexpr std::uint32_t kWeightsOffset = kQueryOffset + kColumns * kRowBytes;
  static constexpr std::uint32_t kFactorOffset = kWeightsOffset + kColumns * kTileRows * 4;
  static constexpr std::uint32_t kSharedBytes = kFactorOffset + kColumns * 4;
  static_assert(kColumns % kTuning.warps == 0 && kColumns % kColumnGroups == 0);
};

}  // namespace tessera::kernels::cuda
