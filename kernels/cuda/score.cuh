// Scores of blocks: how much the query rows of a lane's kv head may find in each block of its
// segments with summaries.
//
//   grid x   pieces of 512 entries of the layer's selections, in a loop   grid y   8 columns each
//
// A warp takes 4 block rows at once and every lane a part of their channels for all 8 columns; the
// 32 sums are then added up across lanes so that lane l ends with row l / 8, column l % 8. Beside
// the scores, a piece leaves each column's maximum and sum over its candidates, and which those
// are: the entries of each block that some query of the item sees.
#pragma once

#include <cstdint>

#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/lane_sums.cuh"
#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/selection_index.h"
#include "kernels/cuda/summary_rows.cuh"
#include "kernels/cuda/work.cuh"

namespace tessera::kernels::cuda {

static_assert(kScoreRows * kTileColumns == kWarp, "a lane per row and column");
inline constexpr std::uint32_t kScoreWarps = kScoreThreads / kWarp;
// Shared memory: max and sum of each warp and column.
inline constexpr std::uint32_t kScoreSharedBytes = kScoreWarps * kTileColumns * 2 * 4;

// A piece of a segment, as a block scores it.
struct Piece {
  std::uint32_t index = 0;  // of the layer
  std::uint32_t strategy = 0;
  std::uint32_t first_entry = 0;  // of the segment
  std::uint32_t entries = 0;
  std::uint32_t first_block = 0;  // of the layer
  std::uint32_t blocks = 0;
  std::uint64_t first_position = 0;  // of the segment
  std::uint64_t summary_table = 0;   // pool offset of the word of the piece's first tile
  Work work;
};

// Called by whole warps.
TESSERA_DEVICE Piece LocatePiece(const AttendParams& params, const StepReader& step,
                                 std::uint32_t index) {
  const std::uint32_t* pieces = step.pieces(params.layer);
  const std::uint32_t place = FindLane(pieces, step.layer(params.layer).selections, index);
  const StepSelection& selection = step.selection(params.layer, place);
  const StepChoice* choices = step.choices(params.layer) + selection.first_choice;
  const std::uint32_t in_lane = index - pieces[place];
  const StepChoice& choice = choices[ChoiceOfPiece(choices, selection.choices, in_lane)];
  const StepSegment& segment =
      step.segments(step.lane(params.layer, selection.lane))[choice.segment];
  Piece piece;
  piece.index = index;
  piece.strategy = segment.strategy;
  piece.first_entry = (in_lane - choice.first_piece) * kScoreEntries;
  const std::uint32_t left = segment.entries - piece.first_entry;
  piece.entries = left < kScoreEntries ? left : kScoreEntries;
  const std::uint32_t block = step.strategy(params.layer, segment.strategy).shape.block;
  piece.first_block = selection.first_block + choice.first_block + piece.first_entry / block;
  piece.blocks = BlocksOf(piece.entries, block);
  piece.first_position = segment.first_position;
  piece.work.lane = selection.lane;
  piece.work.kv_head = selection.lane % step.layer(params.layer).kv_heads;
  piece.work.part.entries = {.begin = 0, .end = piece.entries};
  piece.work.part.tile_table =
      segment.tile_table + std::uint64_t{piece.first_entry / kTileEntries} * 8;
  piece.work.part.strategy = segment.strategy;
  piece.summary_table = segment.summary_table + std::uint64_t{piece.first_entry / kTileEntries} * 8;
  return piece;
}

// The tiles of a piece and their summaries, whose addresses lane t of each warp holds for tile t.
class PieceTiles {
 public:
  // False, for the warps that saw it, where any of them lies outside the pool.
  TESSERA_DEVICE bool Find(const DeviceArena& arena, const Piece& piece, std::uint32_t tile_bytes,
                           std::uint32_t summary_bytes) {
    const bool found = tiles_.Find(arena, piece.work.part, tile_bytes);
    bool bad = false;
    if (gpu::Lane() < TilesOf(piece.entries)) {
      summaries_ = ResolveNamed(arena, piece.summary_table, summary_bytes, kSummaryAlignment);
      bad = summaries_ == 0;
    }
    return gpu::Ballot(bad) == 0 && found;
  }

  // The whole warp asks for the same one.
  TESSERA_DEVICE const std::byte* Tile(std::uint32_t tile) const { return tiles_.Address(tile); }
  TESSERA_DEVICE const std::byte* Summaries(std::uint32_t tile) const {
    return reinterpret_cast<const std::byte*>(gpu::Shuffle(summaries_, tile));
  }

 private:
  PartTiles tiles_;
  std::uint64_t summaries_ = 0;
};

// What the columns of a block of threads see and ask.
template <std::uint32_t kHeadDim>
struct ScoreQuery {
  static constexpr std::uint32_t kPer = kHeadDim / 32;
  float row[kTileColumns][kPer];  // channels lane, lane + 32, ...
};

// Rotated rows with what they were divided by; the rows themselves where tiles are dense.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void LoadScoreQuery(const AttendParams& params, const StepSequence& sequence,
                                   const StepStrategy& strategy, const Piece& piece,
                                   std::uint32_t first_column, std::uint32_t columns,
                                   ScoreQuery<kHeadDim>& query) {
  const bool packed = strategy.shape.packed();
  const auto bytes = static_cast<std::uint32_t>(ElementBytes(params.query_type));
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < kTileColumns; ++c) {
    const std::uint32_t column = first_column + c;
    const bool live = column < columns;
    const std::uint64_t slot = std::uint64_t{piece.strategy} * params.max_columns + column;
    const std::byte* row = nullptr;
    float scale = 1;
    if (live && packed) {
      row = reinterpret_cast<const std::byte*>(params.rotated + slot * kHeadDim);
      scale = params.rotated_scales[slot];
    } else if (live) {
      row = QueryRowOf(params, sequence, piece.work.kv_head, column, bytes);
    }
    const ElementType type =
        packed ? OperandType(ValuesOf(strategy.shape.format)) : params.query_type;
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < ScoreQuery<kHeadDim>::kPer; ++i) {
      query.row[c][i] = live ? LoadElement(row, gpu::Lane() + 32 * i, type) * scale : 0;
    }
  }
}

// What the 8 lanes of a row know of its block together.
struct BlockWords {
  float bias = 0;             // log2 of the largest weight
  std::uint32_t visible = 0;  // entries
};

// `tile` is null where the row has none. Called by whole warps.
TESSERA_DEVICE BlockWords ReadBlockWords(const StepStrategy& strategy, const Piece& piece,
                                         Positions visible, const std::byte* tile,
                                         std::uint32_t first_row, std::uint32_t entries,
                                         std::uint32_t first_entry) {
  const TileWords words = WordsOf(strategy);
  float weight = 0;
  float seen = 0;
  TESSERA_UNROLL
  for (std::uint32_t half = 0; half < kMaxBlockEntries; half += kTileColumns) {
    const std::uint32_t e = half + gpu::Lane() % kTileColumns;
    if (tile == nullptr || e >= entries) continue;
    const std::uint32_t row = first_row + e;
    std::uint64_t position = piece.first_position + first_entry + e;
    if (words.weights) {
      weight = gpu::Max(weight, reinterpret_cast<const float*>(tile + words.weights_at)[row]);
    }
    if (words.positions) {
      position = piece.first_position +
                 reinterpret_cast<const std::uint32_t*>(tile + words.positions_at)[row];
    }
    seen += position >= visible.begin && position < visible.end ? 1 : 0;
  }
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kTileColumns; mask *= 2) {
    weight = gpu::Max(weight, gpu::ShuffleXor(weight, mask));
    seen += gpu::ShuffleXor(seen, mask);
  }
  return {.bias = words.weights ? gpu::Log2(weight) : 0,
          .visible = static_cast<std::uint32_t>(seen)};
}

// What a block of threads asks of a piece: 8 columns.
struct ScoreTask {
  bool found;         // this warp's tiles are in the pool
  bool meets;         // the columns' cell sees something of the segment
  Positions visible;  // to all queries of the item
  std::uint32_t first_column;
  std::uint32_t columns;  // of the item
};

// The rows from `first` on of a piece. Called by whole warps.
TESSERA_DEVICE SummaryPlaces PlacesOf(const Piece& piece, const PieceTiles& tiles, bool found,
                                      std::uint32_t first, std::uint32_t per_tile) {
  SummaryPlaces places;
  TESSERA_UNROLL
  for (std::uint32_t r = 0; r < kScoreRows; ++r) {
    const bool live = first + r < piece.blocks;
    const std::uint32_t row = live ? first + r : first;
    const std::byte* tile = tiles.Tile(row / per_tile);
    const std::byte* summaries = tiles.Summaries(row / per_tile);
    places.tile[r] = found && live ? tile : nullptr;
    places.summaries[r] = found && live ? summaries : nullptr;
    places.block[r] = row % per_tile;
  }
  return places;
}

// The product of row lane / 8 and column lane % 8, without the row's scale.
template <class Rows, std::uint32_t kHeadDim>
TESSERA_DEVICE float MultiplySummaries(const StepStrategy& strategy, const SummaryPlaces& places,
                                       const ScoreQuery<kHeadDim>& query) {
  Rows rows;
  rows.Load(strategy, places);
  float sums[kWarp];
  TESSERA_UNROLL
  for (std::uint32_t r = 0; r < kScoreRows; ++r) {
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < kTileColumns; ++c) {
      float sum = 0;
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < Rows::kPer; ++i) sum += rows.Term(r, i, query.row[c][i]);
      sums[r * kTileColumns + c] = sum;
    }
  }
  return SumAcrossLanes(sums);
}

// Makes products scores and stores them; a lane has one row and column. Called by whole warps.
TESSERA_DEVICE void StoreScores(const AttendParams& params, const StepStrategy& strategy,
                                const Piece& piece, const ScoreTask& task,
                                const SummaryPlaces& places, std::uint32_t first, float product,
                                LogSum& candidates) {
  const std::uint32_t own = gpu::Lane() / kTileColumns;
  const std::byte* tile = places.tile[0];
  const std::byte* summaries = places.summaries[0];
  std::uint32_t in_tile = places.block[0];
  TESSERA_UNROLL
  for (std::uint32_t r = 1; r < kScoreRows; ++r) {
    tile = own == r ? places.tile[r] : tile;
    summaries = own == r ? places.summaries[r] : summaries;
    in_tile = own == r ? places.block[r] : in_tile;
  }
  if (strategy.layout.block_row.scale != 0 && summaries != nullptr) {
    product *= LoadStored<Stored::kBf16>(summaries + strategy.layout.block_scales, in_tile);
  }
  const std::uint32_t block = strategy.shape.block;
  const std::uint32_t number = first + own;  // of the piece
  const std::uint32_t from = number * block;
  const std::uint32_t left = piece.entries > from ? piece.entries - from : 0;
  const BlockWords words = ReadBlockWords(strategy, piece, task.visible, tile, in_tile * block,
                                          left < block ? left : block, piece.first_entry + from);
  if (number >= piece.blocks) return;
  const float score =
      task.meets ? product * params.score_scale + words.bias : gpu::NegativeInfinity();
  const std::uint32_t place = piece.first_block + number;
  const std::uint32_t column = task.first_column + gpu::Lane() % kTileColumns;
  if (words.visible != 0) candidates.Add(score, score == gpu::NegativeInfinity() ? 0 : 1);
  if (column < task.columns) {
    params.scores[std::uint64_t{column} * params.max_blocks + place] = score;
  }
  if (gpu::BlockY() == 0 && gpu::Lane() % kTileColumns == 0) {
    params.visible[place] = static_cast<std::uint8_t>(words.visible);
  }
}

// This warp's rows of a piece.
template <class Rows, std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreRows(const AttendParams& params, const StepStrategy& strategy,
                              const Piece& piece, const PieceTiles& tiles, const ScoreTask& task,
                              const ScoreQuery<kHeadDim>& query, LogSum& candidates) {
  const std::uint32_t per_tile = kTileEntries / strategy.shape.block;
  for (std::uint32_t first = gpu::Warp() * kScoreRows; first < piece.blocks;
       first += kScoreWarps * kScoreRows) {
    const SummaryPlaces places = PlacesOf(piece, tiles, task.found, first, per_tile);
    const float product = MultiplySummaries<Rows>(strategy, places, query);
    StoreScores(params, strategy, piece, task, places, first, product, candidates);
  }
}

template <std::uint32_t kHeadDim, Stored kStored, class... Arguments>
TESSERA_DEVICE void ScorePackedMeans(const StepStrategy& strategy, Arguments&&... arguments) {
  if (strategy.shape.group == 2) {
    ScoreRows<PackedMeans<kHeadDim, kStored, 2>, kHeadDim>(arguments...);
  } else if (strategy.shape.group == 4) {
    ScoreRows<PackedMeans<kHeadDim, kStored, 4>, kHeadDim>(arguments...);
  } else {
    ScoreRows<PackedMeans<kHeadDim, kStored, 1>, kHeadDim>(arguments...);
  }
}

template <std::uint32_t kHeadDim, class... Arguments>
TESSERA_DEVICE void ScoreExtremes(const StepStrategy& strategy, Arguments&&... arguments) {
  switch (MinMaxType(strategy.shape)) {
    case ElementType::kBf16:
      return ScoreRows<Extremes<kHeadDim, Stored::kBf16>, kHeadDim>(arguments...);
    case ElementType::kFp16:
      return ScoreRows<Extremes<kHeadDim, Stored::kFp16>, kHeadDim>(arguments...);
    case ElementType::kFp32:
      return ScoreRows<Extremes<kHeadDim, Stored::kFp32>, kHeadDim>(arguments...);
  }
}

// Picks the rows' form.
template <std::uint32_t kHeadDim, class... Arguments>
TESSERA_DEVICE void ScoreForm(const StepStrategy& strategy, Arguments&&... arguments) {
  if (strategy.shape.summary == Summary::kMinMax) {
    return ScoreExtremes<kHeadDim>(strategy, arguments...);
  }
  switch (strategy.shape.format) {
    case TileFormat::kDenseBf16:
      return ScoreRows<DenseMeans<kHeadDim, Stored::kBf16>, kHeadDim>(arguments...);
    case TileFormat::kDenseFp16:
      return ScoreRows<DenseMeans<kHeadDim, Stored::kFp16>, kHeadDim>(arguments...);
    case TileFormat::kDenseFp32:
      return ScoreRows<DenseMeans<kHeadDim, Stored::kFp32>, kHeadDim>(arguments...);
    case TileFormat::kPackedBf16:
      return ScorePackedMeans<kHeadDim, Stored::kBf16>(strategy, arguments...);
    case TileFormat::kPackedFp16:
      return ScorePackedMeans<kHeadDim, Stored::kFp16>(strategy, arguments...);
    case TileFormat::kPackedInt8:
      return ScorePackedMeans<kHeadDim, Stored::kInt8>(strategy, arguments...);
    case TileFormat::kPackedFp8:
      return ScorePackedMeans<kHeadDim, Stored::kFp8>(strategy, arguments...);
  }
}

// Adds up what the lanes and warps found of each column. The whole block.
TESSERA_DEVICE void StoreLogSums(const AttendParams& params, const Piece& piece,
                                 std::uint32_t first_column, std::uint32_t columns,
                                 LogSum candidates) {
  const LogSum all =
      AddColumns<kScoreWarps>(candidates, reinterpret_cast<float*>(gpu::SharedMemory()));
  if (gpu::Thread() < kTileColumns && first_column + gpu::Thread() < columns) {
    const std::uint64_t slot =
        std::uint64_t{piece.index} * params.max_columns + first_column + gpu::Thread();
    params.score_sums[slot * 2] = all.maximum;
    params.score_sums[slot * 2 + 1] = all.sum;
  }
  gpu::SyncBlock();  // before the next piece's
}

// The kernel's body. blockIdx.y picks the columns.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreBlocks(const AttendParams& params) {
  const StepReader step(params.step);
  if (!Serves(params, step)) return;  // reported by whoever chooses
  const StepLayer& layer = step.layer(params.layer);
  const std::uint32_t pieces =
      layer.selections == 0 ? 0 : step.pieces(params.layer)[layer.selections];
  const std::uint32_t first_column = gpu::BlockY() * kTileColumns;
  const VisibleRule rule = {.causal = params.causal != 0, .window = params.window};
  for (std::uint32_t index = gpu::BlockX(); index < pieces; index += gpu::GridX()) {
    const Piece piece = LocatePiece(params, step, index);
    const StepSequence& sequence = step.sequence(piece.work.lane / layer.kv_heads);
    const std::uint32_t asked = sequence.queries * params.group;
    const std::uint32_t columns = asked < params.max_columns ? asked : params.max_columns;
    // What is visible at all is told where the first columns are.
    if (first_column >= columns && gpu::BlockY() != 0) continue;
    const StepStrategy& strategy = step.strategy(params.layer, piece.strategy);
    PieceTiles tiles;
    const bool found =
        tiles.Find(step.arena(), piece, TileBytesOf(params, step, piece.work.part, 0),
                   strategy.layout.summary_bytes);
    ReportWork(params, sequence, piece.work, found);
    const ScoreTask task = {
        .found = found,
        .meets =
            first_column < columns && Meets(VisibleFromCell(sequence.first_query_position, columns,
                                                            params.group, first_column, rule),
                                            piece.first_position, strategy.position_span),
        .visible = VisibleFromAll(sequence.first_query_position, sequence.queries, rule),
        .first_column = first_column,
        .columns = columns};
    ScoreQuery<kHeadDim> query;
    LoadScoreQuery<kHeadDim>(params, sequence, strategy, piece, first_column, columns, query);
    LogSum candidates;
    ScoreForm<kHeadDim>(strategy, params, strategy, piece, tiles, task, query, candidates);
    StoreLogSums(params, piece, first_column, columns, candidates);
  }
}

}  // namespace tessera::kernels::cuda
