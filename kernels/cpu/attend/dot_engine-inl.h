// Computes with bf16 rows by pair dot products (vdpbf16ps). Rotated queries and weights are rounded
// to bf16; products are exact and summed in fp32. Takes half the multiply instructions of fp32 and
// no conversions. Internal linkage throughout: see ../README.md.
//
// K rows that keep at most half of 64 or 128 channels are not expanded: see sparse_keys-inl.h. V
// rows are interleaved in pairs, (V[2i][c], V[2i+1][c]), so that one instruction adds two rows. For
// up to four query rows the pairs stay in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_packed-inl.h"
#include "kernels/cpu/attend/sparse_keys-inl.h"

namespace tessera::kernels {
namespace {

struct DotEngine {
  // The query scratch holds bf16 in channel order; the weight scratch holds bf16, row after row.
  TESSERA_SIMD std::uint16_t* QueryOf(const PartContext& context, std::uint32_t row) {
    return reinterpret_cast<std::uint16_t*>(context.scratch->queries) +
           row * context.part->padded_channels;
  }
  TESSERA_PER_PASS void LoadQueries(const PartContext& context) {
    const AttendPart& part = *context.part;
    for (std::uint32_t r = 0; r < part.row_count; ++r) {
      RoundRow(reinterpret_cast<const float*>(part.rows[r].query),
               static_cast<int>(part.padded_channels), QueryOf(context, r));
    }
  }
  // A row that is not finite becomes NaN throughout: otherwise a key that dropped the channel would
  // miss it.
  TESSERA_SIMD void RoundRow(const float* from, int channels, std::uint16_t* to) {
    bool finite = true;
    for (int c = 0; c < channels; c += 32) {
      const auto words = Simd::RoundToBf16(Simd::Load(from + c), Simd::Load(from + c + 16));
      finite = finite && Simd::AllFinite(words);
      Simd::StoreWords(reinterpret_cast<std::byte*>(to + c), words);
    }
    if (finite) return;
    for (int c = 0; c < channels; c += 32) {
      Simd::StoreWords(reinterpret_cast<std::byte*>(to + c), Simd::NanWords());
    }
  }

  template <int kRows>
  TESSERA_SIMD void DotDense(const std::byte* keys, int padded, Span live,
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
  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void DotKeys(const PartContext& context, const RowList& keys, Span live,
                            const RowList& ahead, std::byte* plain) {
    const AttendPart& part = *context.part;
    const bool sparse = WithSparseKeys(
        part.shape, part.padded_channels, [&]<int kSteps, int kVectors>() TESSERA_INLINE_LAMBDA {
          using Keys = SparseKeys<kValues, kGroup, kSteps, kVectors>;
          Keys::FindChannels(keys, live, plain);
          bool request = true;
          ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
            Keys::template Dot<kRows>(
                keys, plain, part.shape.key.kept, QueryOf(context, row), live,
                [&](int first) TESSERA_INLINE_LAMBDA {
                  if (request) Request(ahead, first);
                },
                context.scratch->weights + row);
            request = false;  // request once per pass
          });
        });
    if (sparse) return;
    ExpandListed<kValues, kGroup>(part, keys, live, ahead, plain);
    DotPlain(context, plain, live);
  }
  TESSERA_PER_PASS void DotPlain(const PartContext& context, const std::byte* keys, Span live) {
    const AttendPart& part = *context.part;
    ForEachRowGroup(part.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
      DotDense<kRows>(keys, static_cast<int>(part.padded_channels), live, QueryOf(context, row),
                      context.scratch->weights + row);
    });
  }

  TESSERA_SIMD void RoundWeights(const PartContext& context, std::uint32_t row) {
    float* weights = context.scratch->weights[row];
    const auto words = Simd::RoundToBf16(Simd::Load(weights), Simd::Load(weights + 16));
    Simd::StoreWords(reinterpret_cast<std::byte*>(weights), words);
  }

  // ---- V row pairs in registers ----

  // Expands pairs of V rows from their bitmaps and adds them for kRows query rows: steps [kFirst,
  // kFirst + kCount).
  template <ValueType kValues, int kGroup, int kSteps, int kRows, int kFirst, int kCount>
  TESSERA_SIMD void AddSteps(const PartContext& context, const RowList& values, Span live,
                             const RowList& ahead, std::uint32_t row) {
    constexpr int kPadded = Simd::kStepChannels * kSteps;
    float* output = context.partial->output + row * kPadded + Simd::kStepChannels * kFirst;
    const float(*weights)[kTileRows] = context.scratch->weights + row;
    typename Simd::Floats sum[kRows][2 * kCount];
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      TESSERA_UNROLL for (int i = 0; i < 2 * kCount; ++i) {
        sum[n][i] = Simd::Load(output + n * kPadded + 16 * i);
      }
    }
    for (int r = live.begin & ~1; r < live.end; r += 2) {
      typename Simd::Words even[kCount];
      typename Simd::Words odd[kCount];
      const auto expand = [&](int at, typename Simd::Words(&words)[kCount]) TESSERA_INLINE_LAMBDA {
        ExpandSteps<kValues, kGroup, kSteps, kFirst, kCount>(values.bits[at], values.data[at],
                                                             words);
      };
      expand(r, even);
      expand(r + 1, odd);
      if (kFirst == 0 && r % kRowsAtOnce == 0) Request(ahead, r);
      TESSERA_UNROLL for (int i = 0; i < kCount; ++i) {
        const auto low = Simd::InterleaveLow(even[i], odd[i]);
        const auto high = Simd::InterleaveHigh(even[i], odd[i]);
        TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
          const auto weight = Simd::SplatPair(weights[n] + r / 2);
          sum[n][2 * i] = Simd::AddPairDots(sum[n][2 * i], low, weight);
          sum[n][2 * i + 1] = Simd::AddPairDots(sum[n][2 * i + 1], high, weight);
        }
      }
    }
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      TESSERA_UNROLL for (int i = 0; i < 2 * kCount; ++i) {
        Simd::Store(output + n * kPadded + 16 * i, sum[n][i]);
      }
    }
  }
  template <ValueType kValues, int kGroup, int kSteps>
  TESSERA_SIMD void AddFused(const PartContext& context, const RowList& values, Span live,
                             const RowList& ahead) {
    ForEachRowGroup(context.part->row_count, [&]<int kRows>(
                                                 std::uint32_t row) TESSERA_INLINE_LAMBDA {
      if constexpr (kRows * kSteps <= 8) {
        AddSteps<kValues, kGroup, kSteps, kRows, 0, kSteps>(context, values, live, ahead, row);
      } else {  // as many sums as there are registers
        constexpr int kHalf = kSteps / 2;
        AddSteps<kValues, kGroup, kSteps, kRows, 0, kHalf>(context, values, live, ahead, row);
        AddSteps<kValues, kGroup, kSteps, kRows, kHalf, kHalf>(context, values, live, ahead, row);
      }
    });
  }

  // ---- V row pairs in L1 ----

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void ExpandPairs(const AttendPart& part, const RowList& values, Span live,
                                const RowList& ahead, std::byte* to) {
    const auto padded = static_cast<int>(part.padded_channels);
    const std::uint32_t row_data = values.row_data;
    alignas(64) std::byte rows[2][2 * kMaxHeadDim];
    WithSteps(values.channels, padded, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
      for (int r = live.begin & ~1; r < live.end; r += 2) {
        std::byte* pair = to + r * static_cast<std::ptrdiff_t>(padded) * 2;
        TESSERA_UNROLL for (int i = 0; i < 2; ++i) {
          const std::byte* data = values.data[r + i];
          ExpandRow<kValues, kGroup, kSteps>({values.bits[r + i], data, data + row_data}, row_data,
                                             values.channels, padded, rows[i]);
        }
        for (int c = 0; c < 2 * padded; c += 64, pair += 128) {
          const auto even = Simd::LoadWords(rows[0] + c);
          const auto odd = Simd::LoadWords(rows[1] + c);
          Simd::StoreWords(pair, Simd::InterleaveLow(even, odd));
          Simd::StoreWords(pair + 64, Simd::InterleaveHigh(even, odd));
        }
        if (r % kRowsAtOnce == 0) Request(ahead, r);
      }
    });
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

  template <ValueType kValues, int kGroup>
  TESSERA_SIMD void AddValues(const PartContext& context, const RowList& values, Span live,
                              const RowList& ahead, std::byte* plain) {
    const AttendPart& part = *context.part;
    if (part.row_count <= Simd::kRowGroup) {
      bool whole = true;
      const auto padded = static_cast<int>(part.padded_channels);
      WithSteps(values.channels, padded, [&]<int kSteps>() TESSERA_INLINE_LAMBDA {
        if constexpr (kSteps == 0) {
          whole = false;
        } else {
          AddFused<kValues, kGroup, kSteps>(context, values, live, ahead);
        }
      });
      if (whole) return;
    }
    ExpandPairs<kValues, kGroup>(part, values, live, ahead, plain);
    AddPairs(context, plain, live);
  }
  TESSERA_PER_PASS void AddPairs(const PartContext& context, const std::byte* values, Span live) {
    ForEachRowGroup(context.part->row_count,
                    [&]<int kRows>(std::uint32_t row)
                        TESSERA_INLINE_LAMBDA { Add<kRows>(context, values, live, row); });
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
