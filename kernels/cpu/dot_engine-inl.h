// Plain bf16 rows computed with by pair dot products (vdpbf16ps), for machines on which those are
// fast: rotated queries and weights are rounded to bf16, products are exact and summed in fp32.
// Half the multiply instructions of fp32, and no conversions. Internal linkage throughout: see
// README.md.
//
// V rows stand in pairs, word by word: (V[2i][c], V[2i+1][c]), so that one instruction adds two
// rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend_packed-inl.h"

namespace tessera::kernels {
namespace {

struct DotEngine {
  // The queries' scratch holds bf16, in channel order; the weights' bf16, row after row.
  TESSERA_SIMD std::uint16_t* QueryOf(const PartContext& context, std::uint32_t row) {
    return reinterpret_cast<std::uint16_t*>(context.scratch->queries) +
           row * context.part->padded_channels;
  }
  TESSERA_SIMD void LoadQueries(const PartContext& context) {
    const AttendPart& part = *context.part;
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      RoundRow(reinterpret_cast<const float*>(part.rows[r].query),
               static_cast<int>(part.padded_channels), QueryOf(context, r));
    }
  }
  TESSERA_SIMD void RoundRow(const float* from, int channels, std::uint16_t* to) {
    for (int c = 0; c < channels; c += 32) {
      Simd::StoreWords(reinterpret_cast<std::byte*>(to + c),
                       Simd::RoundToBf16(Simd::Load(from + c), Simd::Load(from + c + 16)));
    }
  }

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandKeys(const PackedRows& rows, const Piece& piece, const Ahead& ahead,
                               int padded, std::byte* to) {
    ExpandRows<kValues, kGroup>(rows, piece.first, piece.count, padded, ahead,
                                to + piece.at * static_cast<std::size_t>(padded) * 2);
  }

  template <int kRows>
  TESSERA_SIMD void DotKeys(const std::byte* keys, int padded, Span live,
                            const std::uint16_t* queries, float (*weights)[kTileRows]) {
    const auto blocks = [&](int first, typename Simd::Floats(&block)[kRows]) TESSERA_INLINE_LAMBDA {
      const std::byte* key[kRowsAtOnce];
      TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
        int row = first + r;
        row = row < live.begin ? live.begin : row;
        row = row >= live.end ? live.end - 1 : row;
        key[r] = keys + static_cast<std::size_t>(row) * padded * 2;
      }
      typename Simd::Floats dot[kRows][kRowsAtOnce];
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
        TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) dot[n][r] = Simd::Zero();
      }
      for (int c = 0; c < padded; c += 32) {
        TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
          const auto words = Simd::LoadWords(key[r] + 2 * c);
          TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
            dot[n][r] = Simd::AddPairDots(
                dot[n][r], words,
                Simd::LoadWords(reinterpret_cast<const std::byte*>(queries + n * padded + c)));
          }
        }
      }
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
        block[n] = Simd::SumBlocks(dot[n][0], dot[n][1], dot[n][2], dot[n][3]);
      }
    };
    DotRows<kRows>(
        live, blocks, [](int) {}, weights);
  }
  template <int kRows>
  TESSERA_SIMD void Dot(const PartContext& context, const std::byte* keys, Span live,
                        std::uint32_t first) {
    DotKeys<kRows>(keys, static_cast<int>(context.part->padded_channels), live,
                   QueryOf(context, first), context.scratch->weights + first);
  }

  // V rows in pairs. An odd row waits in plain form for its partner, which may be of another piece.
  struct PairWriter {
    std::byte* to;
    int padded;
    bool waits;
    alignas(64) std::byte waiting[2 * kMaxHeadDim];

    TESSERA_MEMBER void Store(typename Simd::Words even, typename Simd::Words odd) {
      Simd::StoreWords(to, Simd::InterleaveLow(even, odd));
      Simd::StoreWords(to + 64, Simd::InterleaveHigh(even, odd));
      to += 128;
    }
    // The words of steps [0, padded / 32) by `words(step)`.
    template <class Words>
    TESSERA_MEMBER void Take(Words words) {
      for (int step = 0; step < padded / 32; ++step) {
        std::byte* mine = waiting + 64 * step;
        if (waits) {
          Store(Simd::LoadWords(mine), words(step));
        } else {
          Simd::StoreWords(mine, words(step));
        }
      }
      waits = !waits;
    }
    TESSERA_MEMBER void Finish() {
      if (waits) Take([](int) TESSERA_INLINE_LAMBDA { return Simd::ZeroWords(); });
    }
  };

  template <ValueType kValues, int kGroup, int kSteps>
  TESSERA_SIMD void ExpandPiece(const PackedRows& rows, const Piece& piece, const Ahead& ahead,
                                int padded, PairWriter& writer) {
    ForEachRow(rows, piece.first, piece.count, ahead,
               [&](std::uint32_t, const PackedRow& row) TESSERA_INLINE_LAMBDA {
                 if constexpr (kSteps == 0) {
                   alignas(64) std::byte plain[2 * kMaxHeadDim];
                   ExpandStepwise<kValues, kGroup>(row, rows.channels, padded, plain);
                   writer.Take([&](int step) TESSERA_INLINE_LAMBDA {
                     return Simd::LoadWords(plain + 64 * step);
                   });
                 } else {
                   typename Simd::Words words[kSteps];
                   ExpandWhole<kValues, kGroup, kSteps>(row, rows.row_data, words);
                   if (writer.waits) {
                     TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
                       writer.Store(Simd::LoadWords(writer.waiting + 64 * i), words[i]);
                     }
                   } else {
                     TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
                       Simd::StoreWords(writer.waiting + 64 * i, words[i]);
                     }
                   }
                   writer.waits = !writer.waits;
                 }
               });
  }

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandValues(const AttendPart& part, const Gathered& gathered, int padded,
                                 std::byte* to) {
    PairWriter writer = {.to = to, .padded = padded, .waits = false};
    for (std::uint32_t i = 0; i < gathered.count; ++i) {
      const Piece& piece = gathered.pieces[i];
      const PackedRows rows = ValuesOfTile(part.shape, part.layout, piece.run->tile);
      const Ahead ahead = AheadOf(part, piece, /*values=*/true);
      WithSteps(rows.channels, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
        ExpandPiece<kValues, kGroup, kSteps>(rows, piece, ahead, padded, writer);
      });
    }
    writer.Finish();
  }

  TESSERA_SIMD void RoundWeights(const PartContext& context, std::uint32_t row) {
    float* weights = context.scratch->weights[row];
    const auto words = Simd::RoundToBf16(Simd::Load(weights), Simd::Load(weights + 16));
    Simd::StoreWords(reinterpret_cast<std::byte*>(weights), words);
  }

  template <int kRows, int kSteps>
  TESSERA_SIMD void AddBlock(const std::byte* values, int padded, int pairs, int c,
                             const float (*weights)[kTileRows], float* output) {
    typename Simd::Floats sum[kRows][2 * kSteps];
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      TESSERA_UNROLL for (int i = 0; i < 2 * kSteps; ++i) {
        sum[n][i] = Simd::Load(output + n * padded + c + 16 * i);
      }
    }
    const std::byte* pair = values + 4 * c;
    for (int p = 0; p < pairs; ++p, pair += 4 * padded) {
      TESSERA_UNROLL for (int i = 0; i < 2 * kSteps; ++i) {
        const auto words = Simd::LoadWords(pair + 64 * i);
        TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
          sum[n][i] = Simd::AddPairDots(sum[n][i], words, Simd::SplatPair(weights[n] + p));
        }
      }
    }
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      TESSERA_UNROLL for (int i = 0; i < 2 * kSteps; ++i) {
        Simd::Store(output + n * padded + c + 16 * i, sum[n][i]);
      }
    }
  }
  template <int kRows>
  TESSERA_SIMD void Add(const PartContext& context, const std::byte* values, Span live,
                        std::uint32_t first) {
    const auto padded = static_cast<int>(context.part->padded_channels);
    float* output = context.partial->output + first * padded;
    const float(*weights)[kTileRows] = context.scratch->weights + first;
    const int begin = live.begin / 2;
    const int pairs = (live.end + 1) / 2 - begin;
    values += static_cast<std::size_t>(begin) * padded * 4;
    const auto* shifted = reinterpret_cast<const float(*)[kTileRows]>(weights[0] + begin);
    int c = 0;
    for (; c + 64 <= padded; c += 64) AddBlock<kRows, 2>(values, padded, pairs, c, shifted, output);
    if (c < padded) AddBlock<kRows, 1>(values, padded, pairs, c, shifted, output);
  }

  TESSERA_SIMD void Finish(const PartContext& context) {
    const AttendPart& part = *context.part;
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      float* output = context.partial->output + r * part.padded_channels;
      for (std::uint32_t c = 0; c < part.padded_channels; c += 32) {
        const auto pair =
            Simd::InterleavedInOrder({Simd::Load(output + c), Simd::Load(output + c + 16)});
        Simd::Store(output + c, pair.a);
        Simd::Store(output + c + 16, pair.b);
      }
    }
  }
};

}  // namespace
}  // namespace tessera::kernels
