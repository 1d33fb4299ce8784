// Scores blocks: estimates how much attention the query rows of a lane's kv head give to each block
// of its segments with summaries.
//
//   grid x   pieces of 1024 entries of the layer's selections, in a loop   grid y   8 columns each
//
// The products run on tensor cores (summary_rows.cuh): a warp takes 16 block rows at once for all 8
// columns. Besides the scores, a piece stores the number of entries of each block that some query
// of the item sees, and each column's maximum and sum over its candidates. Candidates are the
// blocks with a visible entry.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_sums.cuh"
#include "kernels/cuda/common/rotate.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/summary_rows.cuh"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kScoreWarps = kScoreThreads / kWarp;
// Shared memory: maximum and sum per warp and column, then the query operands. Packed rows need
// only one query part, and use the rest for the rows that each warp expands.
inline constexpr std::uint32_t kScoreSumsBytes = kScoreWarps * kTileColumns * 2 * 4;
TESSERA_HOST_DEVICE constexpr std::uint32_t ScoreSharedBytes(std::uint32_t head_dim) {
  const std::uint32_t parts = ScoreQueryBytes(head_dim, 4);
  const std::uint32_t written =
      ScoreQueryBytes(head_dim, 1) + kScoreWarps * kScoreRows * WrittenRowBytes(head_dim);
  return kScoreSumsBytes + (parts > written ? parts : written);
}

// A piece of a segment, as a block of threads scores it.
struct Piece {
  std::uint32_t index = 0;  // index in the layer
  std::uint32_t strategy = 0;
  std::uint32_t first_entry = 0;  // index in the segment
  std::uint32_t entries = 0;
  std::uint32_t first_block = 0;  // index in the layer
  std::uint32_t blocks = 0;
  std::uint64_t first_position = 0;  // position of the segment's entry 0
  std::uint64_t summary_table = 0;   // pool offset of the table word of the piece's first tile
  Work work;
};

// Warp-collective.
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

// The tiles of a piece and their summaries. Lane t of each warp holds the addresses for tile t.
class PieceTiles {
 public:
  // Returns false if any of them lies outside the pool. Warps may get different results.
  TESSERA_DEVICE bool Find(const DeviceArena& arena, const Piece& piece, std::uint32_t tile_bytes,
                           std::uint32_t summary_bytes) {
    const bool found = tiles_.Find(arena, piece.work.part, tile_bytes);
    bool bad = false;
    if (gpu::Lane() < TilesOf(piece.entries)) {
      summaries_ = ResolveTableEntry(arena, piece.summary_table, summary_bytes, kSummaryAlignment);
      bad = summaries_ == 0;
    }
    return gpu::Ballot(bad) == 0 && found;
  }

  // Lanes may pass different tiles.
  TESSERA_DEVICE const std::byte* Tile(std::uint32_t tile) const { return tiles_.Address(tile); }
  TESSERA_DEVICE const std::byte* Summaries(std::uint32_t tile) const {
    return reinterpret_cast<const std::byte*>(gpu::Shuffle(summaries_, tile));
  }

 private:
  PartTiles tiles_;
  std::uint64_t summaries_ = 0;
};

// What a block of threads computes for a piece: 8 columns.
struct ScoreTask {
  const StepStrategy& strategy;
  bool found;         // this warp's tiles are in the pool
  bool meets;         // the columns' cell sees something of the segment
  Positions visible;  // positions that some query of the item sees
  std::uint32_t first_column;
  std::uint32_t columns;  // columns of the item
};

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

// Facts about a block that its summary does not hold.
struct BlockWords {
  float bias = 0;             // log2 of the largest weight
  std::uint32_t visible = 0;  // entries that some query sees
};

// For blocks of tiles without weights or positions.
TESSERA_DEVICE BlockWords CountVisible(Positions visible, std::uint64_t first,
                                       std::uint32_t entries) {
  const std::uint64_t begin = visible.begin > first ? visible.begin : first;
  const std::uint64_t end = visible.end < first + entries ? visible.end : first + entries;
  return {.bias = 0, .visible = end > begin ? static_cast<std::uint32_t>(end - begin) : 0};
}

// For tiles with weights or positions. `tile` is null if the row has no block. The 4 lanes of a row
// share the work. Warp-collective.
TESSERA_DEVICE BlockWords ReadBlockWords(const TileWords& words, const Piece& piece,
                                         Positions visible, const std::byte* tile,
                                         std::uint32_t first_row, std::uint32_t entries,
                                         std::uint32_t first_entry) {
  float weight = 0;
  float seen = 0;
  for (std::uint32_t e = gpu::Lane() % 4; e < kMaxBlockEntries; e += 4) {
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
  for (std::uint32_t mask = 1; mask < 4; mask *= 2) {
    weight = gpu::Max(weight, gpu::ShuffleXor(weight, mask));
    seen += gpu::ShuffleXor(seen, mask);
  }
  return {.bias = words.weights ? gpu::Log2(weight) : 0,
          .visible = static_cast<std::uint32_t>(seen)};
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
      break;  // the host refuses planes: see IsServed
  }
}

// Adds up the per-column sums of all lanes and warps. Block-collective.
TESSERA_DEVICE void StoreLogSums(const AttendParams& params, const Piece& piece,
                                 std::uint32_t first_column, std::uint32_t columns,
                                 LogSum (&candidates)[2]) {
  const LogSum all =
      AddColumnPairs<kScoreWarps>(candidates, reinterpret_cast<float*>(gpu::SharedMemory()));
  if (gpu::Thread() < kTileColumns && first_column + gpu::Thread() < columns) {
    const std::uint64_t slot =
        std::uint64_t{piece.index} * params.max_columns + first_column + gpu::Thread();
    params.score_sums[slot * 2] = all.maximum;
    params.score_sums[slot * 2 + 1] = all.sum;
  }
  gpu::SyncBlock();  // before the next piece's sums
}

// Kernel body. blockIdx.y selects the columns.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreBlocks(const AttendParams& params) {
  const StepReader step(params.step);
  if (!Serves(params, step)) return;  // SelectBlocks reports the fault
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
    // The first grid row also stores which entries are visible, so it never skips.
    if (first_column >= columns && gpu::BlockY() != 0) continue;
    const StepStrategy& strategy = step.strategy(params.layer, piece.strategy);
    PieceTiles tiles;
    const bool found =
        tiles.Find(step.arena(), piece, TileBytesOf(params, step, piece.work.part, 0),
                   strategy.layout.summary_bytes);
    ReportWork(params, sequence, piece.work, found);
    const ScoreTask task = {
        .strategy = strategy,
        .found = found,
        .meets =
            first_column < columns && Meets(VisibleFromCell(sequence.first_query_position, columns,
                                                            params.group, first_column, rule),
                                            piece.first_position, strategy.position_span),
        .visible = VisibleFromAll(sequence.first_query_position, sequence.queries, rule),
        .first_column = first_column,
        .columns = columns};
    LogSum candidates[2];  // for the lane's two columns of products
    ScoreForm<kHeadDim>(strategy, params, sequence, piece, tiles, task,
                        gpu::SharedMemory() + kScoreSumsBytes, candidates);
    StoreLogSums(params, piece, first_column, columns, candidates);
  }
}

}  // namespace tessera::kernels::cuda
