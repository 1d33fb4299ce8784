// Scores quads by the sign index of their keys:
//
//   score of a row    norm x (q . signs) / |q|, q the int8 codes of the query's first half
//   score of a quad   that of its best row, in log2 units like all scores
//
// The products are integer ones on tensor cores (sign_index.h). A warp takes a tile at once, for
// all 8 columns; nothing but the index is read. A byte's norm comes from a table in shared memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/common/sign_index.h"
#include "kernels/cuda/select/pieces.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kNormBytes = 256 * 4;
// Shared memory: the sums of a piece, then the norms.
inline constexpr std::uint32_t kSignSharedBytes = kScoreSumsBytes + kNormBytes;
inline constexpr float kSignLog2E = 1.44269504088896340736f;

// A lane's operands of 8 columns, and the factors of its two columns of products.
template <std::uint32_t kWords>
struct SignQueries {
  std::uint32_t operand[kWords][2];
  std::int32_t start[2];
  float factor[2];
};

template <std::uint32_t kHeadDim>
TESSERA_DEVICE SignQueries<SignWords(kHeadDim)> LoadSignQueries(const AttendParams& params,
                                                                const Piece& piece,
                                                                const ScoreTask& task) {
  const std::uint64_t first_slot = std::uint64_t{piece.strategy} * params.max_columns;
  const auto codes_of = [&](std::uint32_t column) {
    return reinterpret_cast<const std::byte*>(params.rotated + (first_slot + column) * kHeadDim);
  };
  SignQueries<SignWords(kHeadDim)> queries = {};
  if (const std::uint32_t column = task.first_column + OperandBColumn(gpu::Lane());
      column < task.columns) {
    const auto* chunks = reinterpret_cast<const gpu::Chunk*>(codes_of(column));
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < SignWords(kHeadDim); ++w) {
      std::uint32_t codes[8];
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 8; ++i) codes[i] = chunks[2 * w + i / 4].words[i % 4];
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < 2; ++r) {
        queries.operand[w][r] = SignQuery(codes, gpu::Lane(), r);
      }
    }
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t column = task.first_column + AccumulatorColumn(gpu::Lane(), i);
    if (column >= task.columns) continue;
    const auto& coded = *reinterpret_cast<const CodedQuery*>(codes_of(column) + kHeadDim);
    queries.start[i] = kSignZero - static_cast<std::int32_t>(coded.sum[0]);
    queries.factor[i] = coded.inverse_length * kSignLog2E;
  }
  return queries;
}

// The index of a lane's quad.
template <std::uint32_t kWords>
struct QuadSigns {
  std::uint32_t words[kQuadRows][kWords];
  std::uint32_t norms;  // a byte each
};

// `summaries`: those of a tile. kAligned: at a multiple of 16.
template <std::uint32_t kHeadDim, bool kAligned>
TESSERA_DEVICE QuadSigns<SignWords(kHeadDim)> LoadQuadSigns(const std::byte* summaries) {
  constexpr std::uint32_t kWords = SignWords(kHeadDim);
  const std::uint32_t quad = gpu::Lane() / 4;
  const std::byte* bits = summaries + quad * kQuadRows * kWords * 4;
  QuadSigns<kWords> signs;
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < kWords; ++c) {
    gpu::Chunk chunk;
    if constexpr (kAligned) {
      chunk = reinterpret_cast<const gpu::Chunk*>(bits)[c];
    } else {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        chunk.words[i] = reinterpret_cast<const std::uint32_t*>(bits)[4 * c + i];
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      signs.words[(4 * c + i) / kWords][(4 * c + i) % kWords] = chunk.words[i];
    }
  }
  signs.norms = reinterpret_cast<const std::uint32_t*>(summaries + NormsAt(kHeadDim))[quad];
  return signs;
}

// Replaces the rows of a quad from `entries` on by its first, which leaves its best as it is.
template <std::uint32_t kWords>
TESSERA_DEVICE void RepeatFirstRow(std::uint32_t entries, QuadSigns<kWords>& signs) {
  TESSERA_UNROLL
  for (std::uint32_t r = 1; r < kQuadRows; ++r) {
    if (r < entries) continue;
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < kWords; ++w) signs.words[r][w] = signs.words[0][w];
    signs.norms = (signs.norms & ~(0xffu << (8 * r))) | (signs.norms & 0xff) << (8 * r);
  }
}

// scores[i]: of the lane's quad for its column i. Warp-collective.
template <std::uint32_t kWords>
TESSERA_DEVICE void ScoreQuad(const SignQueries<kWords>& queries, const QuadSigns<kWords>& signs,
                              const float* norms, float (&scores)[2]) {
  const std::uint32_t turn = SignTurn(gpu::Lane());
  TESSERA_UNROLL
  for (std::uint32_t p = 0; p < kQuadRows / 2; ++p) {
    std::int32_t products[4] = {queries.start[0], queries.start[1], queries.start[0],
                                queries.start[1]};
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < kWords; ++w) {
      const SignOperand rows = SignOperandOf(gpu::RotateLeft(signs.words[2 * p][w], turn),
                                             gpu::RotateLeft(signs.words[2 * p + 1][w], turn));
      gpu::MmaBytes(products, rows.a, queries.operand[w]);
    }
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      const float norm = norms[signs.norms >> (8 * (2 * p + i / 2)) & 0xff];
      const float score = (std::bit_cast<float>(products[i]) - kSignZeroValue) * norm;
      scores[i % 2] = p == 0 && i < 2 ? score : gpu::Max(scores[i % 2], score);
    }
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) scores[i] *= queries.factor[i];
}

// What a warp needs to know of a piece in all its tiles.
struct SignPiece {
  TileWords words;     // positions only
  bool whole;          // the queries see every entry of the piece
  bool sums;           // values are shares
  float* scores[2];    // of the lane's quad of tile 0; null after the last column
  std::uint8_t* seen;  // the same for `visible`; null in lanes that do not store it
};

TESSERA_DEVICE SignPiece SignPieceOf(const AttendParams& params, const StepSequence& sequence,
                                     const Piece& piece, const ScoreTask& task) {
  const std::uint32_t place = piece.first_block + gpu::Lane() / 4;
  const std::uint64_t first = piece.first_position + piece.first_entry;
  const TileWords words = WordsOf(task.strategy);
  SignPiece of = {
      .words = {.positions = words.positions, .positions_at = words.positions_at},
      .whole = task.visible.begin <= first && task.visible.end >= first + piece.entries,
      .sums = sequence.rule.by_share != 0,
      .scores = {},
      .seen = gpu::BlockY() == 0 && gpu::Lane() % 4 == 0 ? params.visible + place : nullptr};
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t column = task.first_column + AccumulatorColumn(gpu::Lane(), i);
    if (column >= task.columns) continue;
    of.scores[i] = params.scores + std::uint64_t{column} * params.max_blocks + place;
  }
  return of;
}

// Scores the quads of a tile of the piece and stores what is known of them. Warp-collective.
template <std::uint32_t kHeadDim, bool kAligned>
TESSERA_DEVICE void ScoreSignTile(const Piece& piece, const PieceTiles& tiles,
                                  const ScoreTask& task, const SignPiece& known, std::uint32_t tile,
                                  const SignQueries<SignWords(kHeadDim)>& queries,
                                  const float* norms, LogSum (&candidates)[2]) {
  auto signs = LoadQuadSigns<kHeadDim, kAligned>(tiles.Summaries(tile));
  const std::uint32_t quad = gpu::Lane() / 4;
  const std::uint32_t from = tile * kTileEntries + quad * kQuadRows;
  const std::uint32_t left = piece.entries > from ? piece.entries - from : 0;
  const std::uint32_t entries = left < kQuadRows ? left : kQuadRows;
  if (piece.entries < (tile + 1) * kTileEntries) RepeatFirstRow(entries, signs);
  float scores[2];
  ScoreQuad(queries, signs, norms, scores);
  std::uint32_t visible = entries;
  if (known.words.positions) {
    visible = ReadBlockWords(known.words, piece, task.visible, tiles.Tile(tile), quad * kQuadRows,
                             entries, piece.first_entry + from)
                  .visible;
  } else if (!known.whole) {
    visible = CountVisible(task.visible, piece.first_position + piece.first_entry + from, entries)
                  .visible;
  }
  if (entries == 0) return;
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 2; ++i) {
    const float score = task.meets ? scores[i] : gpu::NegativeInfinity();
    if (known.sums && visible != 0) {
      candidates[i].Add(score, score == gpu::NegativeInfinity() ? 0 : 1);
    }
    if (known.scores[i] != nullptr) known.scores[i][tile * kTileQuads] = score;
  }
  if (known.seen != nullptr) known.seen[tile * kTileQuads] = static_cast<std::uint8_t>(visible);
}

// Scores this warp's tiles of a piece. If one is not in the pool nothing is read, and none of the
// quads is selected.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreSignTiles(const AttendParams& params, const StepSequence& sequence,
                                   const Piece& piece, const PieceTiles& tiles,
                                   const ScoreTask& task, const float* norms) {
  const SignPiece known = SignPieceOf(params, sequence, piece, task);
  const auto queries = LoadSignQueries<kHeadDim>(params, piece, task);
  LogSum candidates[2];
  const auto walk = [&](auto act) {
    for (std::uint32_t tile = gpu::Warp(); tile < TilesOf(piece.entries); tile += kScoreWarps) {
      act(tile);
    }
  };
  if (!task.found) {
    walk([&](std::uint32_t tile) {
      const bool live = tile * kTileQuads + gpu::Lane() / 4 < piece.blocks;
      if (live && known.seen != nullptr) known.seen[tile * kTileQuads] = 0;
    });
  } else if (tiles.SummariesAligned(sizeof(gpu::Chunk))) {
    walk([&](std::uint32_t tile) {
      ScoreSignTile<kHeadDim, true>(piece, tiles, task, known, tile, queries, norms, candidates);
    });
  } else {
    walk([&](std::uint32_t tile) {
      ScoreSignTile<kHeadDim, false>(piece, tiles, task, known, tile, queries, norms, candidates);
    });
  }
  if (known.sums) StoreLogSums(params, piece, task.first_column, task.columns, candidates);
}

// Kernel body. blockIdx.y selects the columns.
template <std::uint32_t kHeadDim>
TESSERA_DEVICE void ScoreSigns(const AttendParams& params) {
  auto* norms = reinterpret_cast<float*>(gpu::SharedMemory() + kScoreSumsBytes);
  for (std::uint32_t k = gpu::Thread(); k < kNormBytes / 4; k += kScoreThreads) {
    norms[k] = k == 0 ? 0 : gpu::Exp2(static_cast<float>(k) / 8 - 16);
  }
  gpu::SyncBlock();
  ForEachPiece(params, /*signs=*/true,
               [&](const StepSequence& sequence, const Piece& piece, const PieceTiles& tiles,
                   const ScoreTask& task) {
                 ScoreSignTiles<kHeadDim>(params, sequence, piece, tiles, task, norms);
               });
}

}  // namespace tessera::kernels::cuda
