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
  static constexpr ElementType kRowType = ElementType::kBf16;

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
  TESSERA_SIMD void ExpandKeys(const PackedRows& rows, const Piece& piece, int padded,
                               std::byte* to) {
    ExpandRows<kValues, kGroup>(rows, piece.first, piece.count, padded,
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

  // Two rows, word by word.
  template <ValueType kValues, int kGroup>
  TESSERA_SIMD std::byte* ExpandPair(const PackedRows& even, std::uint32_t even_row,
                                     const PackedRows& odd, std::uint32_t odd_row, bool has_odd,
                                     int padded, std::byte* to) {
    auto first = ReadRow<kValues, kGroup>(even, even_row);
    auto second = ReadRow<kValues, kGroup>(odd, odd_row);
    for (int c = 0; c < padded; c += 32) {
      const auto a = first.Step(c);
      const auto b = has_odd ? second.Step(c) : Simd::ZeroWords();
      Simd::StoreWords(to, Simd::InterleaveLow(a, b));
      Simd::StoreWords(to + 64, Simd::InterleaveHigh(a, b));
      to += 128;
    }
    return to;
  }
  // As many pairs of neighbouring rows as may be read at once; returns the rows.
  template <ValueType kValues, int kGroup, int kSteps>
  TESSERA_SIMD std::uint32_t ExpandWholePairs(const PackedRows& rows, std::uint32_t first,
                                              std::uint32_t count, std::byte* to) {
    const std::uint32_t whole = WholeRows<kSteps>(rows, first, count) / 2 * 2;
    for (std::uint32_t r = first; r < first + whole; r += 2) {
      const std::byte* bits = rows.bits + r * rows.row_bits;
      const std::byte* data = rows.data + r * rows.row_data;
      typename Simd::Words a[kSteps];
      typename Simd::Words b[kSteps];
      ExpandWhole<kValues, kGroup, kSteps>(bits, data, rows.last_load, a);
      ExpandWhole<kValues, kGroup, kSteps>(bits + rows.row_bits, data + rows.row_data,
                                           rows.last_load, b);
      TESSERA_UNROLL for (int i = 0; i < kSteps; ++i) {
        Simd::StoreWords(to, Simd::InterleaveLow(a[i], b[i]));
        Simd::StoreWords(to + 64, Simd::InterleaveHigh(a[i], b[i]));
        to += 128;
      }
    }
    return whole;
  }

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandValues(const AttendPart& part, const Gathered& gathered, int padded,
                                 std::byte* to) {
    PackedRows held = {};  // a row whose partner is in the next piece
    std::uint32_t held_row = 0;
    bool holds = false;
    for (std::uint32_t i = 0; i < gathered.count; ++i) {
      const Piece& piece = gathered.pieces[i];
      const PackedRows rows = ValuesOfTile(part.shape, part.layout, piece.run->tile);
      std::uint32_t r = piece.first;
      const std::uint32_t end = piece.first + piece.count;
      if (holds) to = ExpandPair<kValues, kGroup>(held, held_row, rows, r++, true, padded, to);
      std::uint32_t whole = 0;
      if (padded == 128) {
        whole = ExpandWholePairs<kValues, kGroup, 4>(rows, r, end - r, to);
      } else if (padded == 64) {
        whole = ExpandWholePairs<kValues, kGroup, 2>(rows, r, end - r, to);
      }
      to += static_cast<std::size_t>(whole) * padded * 2;
      for (r += whole; r + 1 < end; r += 2) {
        to = ExpandPair<kValues, kGroup>(rows, r, rows, r + 1, true, padded, to);
      }
      holds = r < end;
      held = rows;
      held_row = r;
    }
    if (holds) ExpandPair<kValues, kGroup>(held, held_row, held, held_row, false, padded, to);
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
