// Scores blocks: estimates how much attention the query rows of a lane's kv head give to each block
// of its segments with summaries.
//
// The products run on tensor cores (summary_rows.cuh): a warp takes 16 block rows at once for all 8
// columns.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_sums.cuh"
#include "kernels/cuda/common/rotate.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/summary_rows.cuh"
#include "kernels/cuda/common/work.cuh"
#include "kernels/cuda/select/pieces.cuh"

namespace tessera::kernels::cuda {

// Shared memory: the sums of a piece, then the query operands. Packed rows need only one query
// part, and use the rest for the rows that each warp expands.
TESSERA_HOST_DEVICE constexpr std::uint32_t ScoreSharedBytes(std::uint32_t head_dim) {
  const std::uint32_t parts = ScoreQueryBytes(head_dim, 4);
  const std::uint32_t written =
      ScoreQueryBytes(head_dim, 1) + kScoreWarps * kScoreRows * WrittenRowBytes(head_dim);
  return kScoreSumsBytes + (parts > written ? parts : written);
}

// Stores the query operands of 8 columns for all warps, and returns the factors for a lane's two
// columns of products: rotated rows were divided by a power of two. Block-collective; no thread may
// still be reading the previous piece's operands.
template <class Shape>
TESSERA_DEVICE void LoadScoreQuery(const AttendParams& params, const StepSequence& sequence,
                                   const Piece& piece, const ScoreTask& task,
                                   std::uint32_t* operands, float (&scale)[2]) {
  const bool packed = task.strategy.shape.packed();
  const ElementType type =
      packed ? OperandType(ValuesOf(task.strategy.shape.format)) : params.query_type;
  const auto bytes = static_cast<std::uint32_t>(ElementBytes(params.query_type));
  const std::uint64_t first_slot = std::uint64_t{piece.strategy} * params.max_columns;
  const auto row_of = [&](std::uint32_t column) {
    return packed ? reinterpret_cast<const std::byte*>(params.rotated +
                                                       (first_slot + column) * Shape::kHeadDim)
                  : QueryRowOf(params, sequence, piece.work.kv_head, column, bytes);
  };
  constexpr std::uint32_t kWords = Shape::kSteps * kWarp * 2;
  for (std::uint32_t at = gpu::Thread(); at < kWords; at += kScoreThreads) {
    const std::uint32_t lane = at / 2 % kWarp;
    const std::uint32_t channel = ScoreChannel<Shape::kSplit>(lane, at / 2 / kWarp, at % 2);
    const std::uint32_t column = task.first_column + OperandBColumn(lane);
    float low = 0;
    float high = 0;
    if (column < task.columns) {
      low = LoadElement(row_of(column), channel, type);
      high = LoadElement(row_of(column), channel + 1, type);
    }
    TESSERA_UNROLL
    for (std::uint32_t part = 0; part < Shape::kQueryParts; ++part) {
      operands[part * kWords + at] =
          gpu::PackPair<Shape::kType>(QueryPart<Shape>(low, part), QueryPart<Shape>(high, part));
    }
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t column = task.first_column + AccumulatorColumn(gpu::Lane(), i);
    scale[i] = packed && column < task.columns ? params.rotated_scales[first_slot + column] : 1;
  }
  gpu::SyncBlock();
}

// Location of a row of a piece. `summaries` is null if the row has no tile.
struct ScoreRow {
  const std::byte* tile;
  const std::byte* summaries;
  std::uint32_t in_tile;
};

// Warp-collective; lanes may pass different rows.
TESSERA_DEVICE ScoreRow FindRow(const Piece& piece, const PieceTiles& tiles, const ScoreTask& task,
                                std::uint32_t number) {
  const bool live = task.found && number < piece.blocks;
  const std::uint32_t entry = live ? number * task.strategy.shape.block : 0;  // index in the piece
  const std::byte* tile = tiles.Tile(entry / kTileEntries);
  const std::byte* summaries = tiles.Summaries(entry / kTileEntries);
  const std::uint32_t per_tile = kTileEntries / task.strategy.shape.block;  // a power of two
  return {.tile = live ? tile : nullptr,
          .summaries = live ? summaries : nullptr,
          .in_tile = number & (per_tile - 1)};
}

// Turns the products of a row into scores and stores them. Warp-collective.
TESSERA_DEVICE void StoreScores(const AttendParams& params, const Piece& piece,
                                const ScoreTask& task, const ScoreRow& row, std::uint32_t number,
                                const float (&products)[2], LogSum (&candidates)[2]) {
  const TileLayout& layout = task.strategy.layout;
  float scale = 1;
  if (layout.block_row.scale != 0 && row.summaries != nullptr) {
    const auto* scales =
        reinterpret_cast<const std::uint16_t*>(row.summaries + layout.block_scales);
    scale = std::bit_cast<float>(static_cast<std::uint32_t>(scales[row.in_tile]) << 16);
  }
  const std::uint32_t block = task.strategy.shape.block;
  const std::uint32_t from = number * block;
  const std::uint32_t left = piece.entries > from ? piece.entries - from : 0;
  const std::uint32_t entries = left < block ? left : block;
  const TileWords words = WordsOf(task.strategy);
  BlockWords known;
  if (words.weights || words.positions) {
    known = ReadBlockWords(words, piece, task.visible, row.tile, row.in_tile * block, entries,
                           piece.first_entry + from);
  } else if (row.tile != nullptr) {
    known = CountVisible(task.visible, piece.first_position + piece.first_entry + from, entries);
  }
  if (number >= piece.blocks) return;
  const std::uint32_t place = piece.first_block + number;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const float score = task.meets ? products[i] * scale * params.score_scale + known.bias
                                   : gpu::NegativeInfinity();
    if (known.visible != 0) {
      candidates[i].Add(score, score == gpu::NegativeInfinity() ? 0 : 1);
    }
    const std::uint32_t column = task.first_column + AccumulatorColumn(gpu::Lane(), i);
    if (column < task.columns) {
      params.scores[std::uint64_t{column} * params.max_blocks + place] = score;
    }
  }
  if (gpu::BlockY() == 0 && gpu::Lane() % 4 == 0) {
    params.visible[place] = static_cast<std::uint8_t>(known.visible);
  }
}

// Scores this warp's rows of a piece. multiply_rows(rows, multiply) computes the products of 16
// rows, two rows per lane.
template <class Shape, class MultiplyRows>
TESSERA_DEVICE void ScoreTiles(const AttendParams& params, const StepSequence& sequence,
                               const Piece& piece, const PieceTiles& tiles, const ScoreTask& task,
                               std::byte* shared, LogSum (&candidates)[2],
                               MultiplyRows multiply_rows) {
  auto* operands = reinterpret_cast<std::uint32_t*>(shared);
  float query_scale[2];
  LoadScoreQuery<Shape>(params, sequence, piece, task, operands, query_scale);
  for (std::uint32_t first = gpu::Warp() * kScoreRows; first < piece.blocks;
       first += kScoreWarps * kScoreRows) {
    float products[4] = {};
    const auto multiply = [&](std::uint32_t step, std::uint32_t part,
                              const std::uint32_t(&rows)[4]) {
      const std::uint32_t* at =
          operands + ((part * Shape::kSteps + step) * kWarp + gpu::Lane()) * 2;
      const std::uint32_t query[2] = {at[0], at[1]};
      gpu::Mma<Shape::kType>(products, rows, query);
    };
    multiply_rows(first, multiply);
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < 2; ++r) {
      const std::uint32_t number = first + AccumulatorRow(gpu::Lane(), 2 * r);
      const float of_row[2] = {products[2 * r] * query_scale[0],
                               products[2 * r + 1] * query_scale[1]};
      StoreScores(params, piece, task, FindRow(piece, tiles, task, number), number, of_row,
                  candidates);
    }
  }
}

// Scores rows that are read as stored: means of dense rows, or extremes of any rows.
template <std::uint32_t kHeadDim, Stored kStored, bool kExtremes>
TESSERA_DEVICE void ScoreStored(const AttendParams& params, const StepSequence& sequence,
                                const Piece& piece, const PieceTiles& tiles, const ScoreTask& task,
                                std::byte* shared, LogSum (&candidates)[2]) {
  using Shape = ScoreShape<kHeadDim, kStored, kExtremes>;
  const TileLayout& layout = task.strategy.layout;
  const std::uint32_t channels = kExtremes ? task.strategy.shape.key.channels : kHeadDim;
  ScoreTiles<Shape>(params, sequence, piece, tiles, task, shared, candidates,
                    [&](std::uint32_t first, const auto& multiply) {
                      const std::byte* rows[2];
                      TESSERA_UNROLL
                      for (std::uint32_t r = 0; r < 2; ++r) {
                        const ScoreRow row =
                            FindRow(piece, tiles, task, first + AccumulatorRow(gpu::Lane(), 2 * r));
                        rows[r] = row.summaries == nullptr
                                      ? nullptr
                                      : row.summaries + layout.block_data +
                                            row.in_tile * layout.block_row.data;
                      }
                      MultiplyStored<Shape>(rows, channels, multiply);
                    });
}

// Expands 16 rows of means whose operands have the type kOperand.
template <std::uint32_t kHeadDim, ElementType kOperand>
TESSERA_DEVICE void WriteMeansOf(const StepStrategy& strategy, const ScoreRow& row,
                                 std::byte* written) {
  const auto write = [&]<Stored kStored>() {
    if (strategy.shape.group == 2) {
      WriteMeans<kHeadDim, kStored, 2>(strategy, row.summaries, row.in_tile, written);
    } else if (strategy.shape.group == 4) {
      WriteMeans<kHeadDim, kStored, 4>(strategy, row.summaries, row.in_tile, written);
    } else {
      WriteMeans<kHeadDim, kStored, 1>(strategy, row.summaries, row.in_tile, written);
    }
  };
  if constexpr (kOperand == ElementType::kFp16) {
    write.template operator()<Stored::kFp16>();
  } else if (strategy.shape.format == TileFormat::kPackedInt8) {
    write.template operator()<Stored::kInt8>();
  } else if (strategy.shape.format == TileFormat::kPackedFp8) {
    write.template operator()<Stored::kFp8>();
  } else {
    write.template operator()<Stored::kBf16>();
  }
}

// Scores means of packed rows. One body per type of operands, since a copy for every kind of row
// compiles for minutes and only the expansion differs.
template <std::uint32_t kHeadDim, Stored kOperands>
TESSERA_DEVICE void ScorePacked(const AttendParams& params, const StepSequence& sequence,
                                const Piece& piece, const PieceTiles& tiles, const ScoreTask& task,
                                std::byte* shared, LogSum (&candidates)[2]) {
  using Shape = ScoreShape<kHeadDim, kOperands, false>;
  std::byte* written =
      shared + ScoreQueryBytes(kHeadDim, 1) + gpu::Warp() * kScoreRows * WrittenRowBytes(kHeadDim);
  ScoreTiles<Shape>(params, sequence, piece, tiles, task, shared, candidates,
                    [&](std::uint32_t first, const auto& multiply) {
                      const ScoreRow row = FindRow(piece, tiles, task, first + gpu::Lane() / 2);
                      gpu::SyncWarp();  // every lane is done with the previous rows
                      WriteMeansOf<kHeadDim, Shape::kType>(task.strategy, row, written);
                      gpu::SyncWarp();
                      MultiplyWritten<Shape>(written, multiply);
                    });
}

template <std::uint32_t kHeadDim, class... Arguments>
TESSERA_DEVICE void ScoreExtremes(const StepStrategy& strategy, Arguments&&... arguments) {
  switch (MinMaxType(strategy.shape)) {
    case ElementType::kBf16:
      return ScoreStored<kHeadDim, Stored::kBf16, true>(arguments...);
    case ElementType::kFp16:
      return ScoreStored<kHeadDim, Stored::kFp16, true>(arguments...);
    case ElementType::kFp32:
      return ScoreStored<kHeadDim, Stored::kFp32, true>(arguments...);
  }
}

// Dispatches on the form of the rows.
template <std::uint32_t kHeadDim, class... Arguments>
TESSERA_DEVICE void ScoreForm(const StepStrategy& strategy, Arguments&&... arguments) {
  if (strategy.shape.summary == Summary::kMinMax) {
    return ScoreExtremes<kHeadDim>(strategy, arguments...);
  }
  switch (strategy.shape.format) {
    case TileFormat::kDenseBf16:
      return ScoreStored<kHeadDim, Stored::kBf16, false>(arguments...);
    case TileFormat::kDenseFp16:
      return ScoreStored<kHeadDim, Stored::kFp16, false>(arguments...);
    case TileFormat::kDenseFp32:
      return ScoreStored<kHeadDim, Stored::kFp32, false>(arguments...);
    case TileFormat::kPackedFp16:
      return ScorePacked<kHeadDim, Stored::kFp16>(arguments...);
    case TileFormat::kPackedBf16:
    case TileFormat::kPackedInt8:
    case TileFormat::kPackedFp8:
      return ScorePacked<kHeadDim, Stored::kBf16>(arguments...);
    case TileFormat::kPlanes:
      break;  // planes have no summaries but signs
  }
}

// Kernel body, for every kind of summary but signs. blockIdx.y selects the columns.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreBlocks(const AttendParams& params) {
  ForEachPiece(params, /*signs=*/false,
               [&](const StepSequence& sequence, const Piece& piece, const PieceTiles& tiles,
                   const ScoreTask& task) {
                 LogSum candidates[2];  // for the lane's two columns of products
                 ScoreForm<kHeadDim>(task.strategy, params, sequence, piece, tiles, task,
                                     gpu::SharedMemory() + kScoreSumsBytes, candidates);
                 StoreLogSums(params, piece, task.first_column, task.columns, candidates);
               });
}

}  // namespace tessera::kernels::cuda
