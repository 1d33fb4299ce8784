// Dot products with sparse K rows without expanding them: the query's words are picked by the
// channels of the stored values, for two rows at once. Needs one pair dot per 32 stored values and
// query row instead of one per 32 channels, and converts 8-bit values before they are spread, not
// after. Internal linkage throughout: see ../README.md.
//
//   bitmap 0100 0110 0001 ──▶ channels 1 5 6 11 ──▶ q[1] q[5] q[6] q[11]
//                             values   a b c d   .  ─────────────────────
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/gathered-inl.h"

namespace tessera::kernels {
namespace {

// Rows of kSteps whole steps (64 or 128 channels) with up to 32 kVectors stored values.
template <ValueType kValues, int kGroup, int kSteps, int kVectors>
struct SparseKeys {
  static constexpr int kChannels = Simd::kStepChannels * kSteps;
  static constexpr int kRowBytes = 32 * kVectors / kGroup;  // of a row's channels, one per group
  static constexpr int kStored = kRowBytes > 32 ? 64 : 32;  // bytes written by one store
  // A garbage bitmap may have a bit for each group. What it writes past its row belongs to the next
  // row, which is written later.
  static constexpr int kBytes = kTileRows * kRowBytes + 2 * 64;
  static_assert(kBytes <= kTileRows * 2 * kMaxHeadDim);

  // Lists the channels of whole groups of kRowsAtOnce rows, as Dot reads them.
  TESSERA_SIMD void FindChannels(const RowList& keys, Span live, std::byte* channels) {
    const int end = (live.end + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
    for (int r = live.begin / kRowsAtOnce * kRowsAtOnce; r < end; ++r) {
      Simd::StoreChannels<kGroup, kChannels / kGroup, kStored>(keys.bits[r],
                                                               channels + r * kRowBytes);
    }
  }

  // Like DotRows in tile_math-inl.h. Queries are rows of kChannels words.
  template <int kRows, class After>
  TESSERA_SIMD void Dot(const RowList& keys, const std::byte* channels, std::uint32_t kept,
                        const std::uint16_t* queries, Span live, After after,
                        float (*weights)[kTileRows]) {
    constexpr int kTableBytes = kChannels * 2;
    alignas(64) std::byte tables[kRows][kTableBytes];
    TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
      Simd::SplitBytes<kChannels>(reinterpret_cast<const std::byte*>(queries + n * kChannels),
                                  tables[n]);
    }
    const auto blocks = [&](int first, typename Simd::Floats(&block)[kRows]) TESSERA_INLINE_LAMBDA {
      typename Simd::Words stored[kRowsAtOnce][kVectors];
      typename Simd::Words numbers[kRowsAtOnce / 2][kVectors];
      TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t left = kept - static_cast<std::uint32_t>(32 * v);
        const std::uint32_t bits = left >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << left) - 1;
        TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
          stored[r][v] =
              Simd::LoadStored<kValues>(keys.data[first + r] + 32 * v * kValueBytes<kValues>, bits);
        }
        TESSERA_UNROLL for (int p = 0; p < kRowsAtOnce / 2; ++p) {
          const std::byte* pair = channels + (first + 2 * p) * kRowBytes + v * 32 / kGroup;
          numbers[p][v] = Simd::LoadChannelPair<kGroup>(pair, pair + kRowBytes);
        }
      }
      TESSERA_UNROLL for (int n = 0; n < kRows; ++n) {
        typename Simd::Floats dot[kRowsAtOnce];
        TESSERA_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) dot[r] = Simd::Zero();
        TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
          TESSERA_UNROLL for (int p = 0; p < kRowsAtOnce / 2; ++p) {
            const auto picked = Simd::PickPair<kChannels>(tables[n], numbers[p][v]);
            dot[2 * p] = Simd::AddPairDots(dot[2 * p], stored[2 * p][v], picked.a);
            dot[2 * p + 1] = Simd::AddPairDots(dot[2 * p + 1], stored[2 * p + 1][v], picked.b);
          }
        }
        block[n] = Simd::SumBlocks(dot[0], dot[1], dot[2], dot[3]);
      }
    };
    DotRows<kRows>(live, blocks, after, weights);
  }
};

// Calls run.operator()<steps, vectors>() if SparseKeys supports this shape and is cheaper;
// otherwise returns false. Depends on the shape alone, so that a row always has the same bits.
template <class Run>
TESSERA_SIMD bool WithSparseKeys(const TileShape& shape, std::uint32_t padded, Run run) {
  if (shape.key.channels != padded) return false;  // the queries' rows have another length
  if (shape.key.channels == 128 && shape.key.kept <= 32) {
    run.template operator()<4, 1>();
  } else if (shape.key.channels == 128 && shape.key.kept <= 64) {
    run.template operator()<4, 2>();
  } else if (shape.key.channels == 64 && shape.key.kept <= 32) {
    run.template operator()<2, 1>();
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace tessera::kernels
