// Pieces of segments, in which blocks of threads score the blocks of a layer's selections.
//
//   grid x   pieces of 1024 entries of the layer's selections, in a loop   grid y   8 columns each
//
// Besides the scores, a piece stores the number of entries of each block that some query of the
// item sees and, if values are shares, each column's maximum and sum over its candidates.
// Candidates are the blocks with a visible entry.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_sums.cuh"
#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/sign_index.h"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kScoreWarps = kScoreThreads / kWarp;
// Shared memory of a piece, at its begin: maximum and sum per warp and column.
inline constexpr std::uint32_t kScoreSumsBytes = kScoreWarps * kTileColumns * 2 * 4;

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
  // Whether all summaries are at multiples of `bytes`. Warp-collective.
  TESSERA_DEVICE bool SummariesAligned(std::uint32_t bytes) const {
    return gpu::Ballot(summaries_ % bytes != 0) == 0;
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

// Calls score(sequence, piece, tiles, task) for each piece of segments with signs, or of the
// others. Block-collective.
template <class Score>
TESSERA_DEVICE void ForEachPiece(const AttendParams& params, bool signs, Score score) {
  const StepReader step(params.step);
  if (!Serves(params, step)) return;  // SelectBlocks reports the fault
  const StepLayer& layer = step.layer(params.layer);
  const std::uint32_t pieces =
      layer.selections == 0 ? 0 : step.pieces(params.layer)[layer.selections];
  const std::uint32_t first_column = gpu::BlockY() * kTileColumns;
  const VisibleRule rule = {.causal = params.causal != 0, .window = params.window};
  for (std::uint32_t index = gpu::BlockX(); index < pieces; index += gpu::GridX()) {
    const Piece piece = LocatePiece(params, step, index);
    const StepStrategy& strategy = step.strategy(params.layer, piece.strategy);
    if (HasSigns(strategy.shape) != signs) continue;
    const StepSequence& sequence = step.sequence(piece.work.lane / layer.kv_heads);
    const std::uint32_t asked = sequence.queries * params.group;
    const std::uint32_t columns = asked < params.max_columns ? asked : params.max_columns;
    // The first grid row also stores which entries are visible, so it never skips.
    if (first_column >= columns && gpu::BlockY() != 0) continue;
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
    score(sequence, piece, tiles, task);
  }
}

}  // namespace tessera::kernels::cuda
