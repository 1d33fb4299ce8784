// Encodes tiles. Written over the including file's `Simd`. Internal linkage throughout: see
// ../README.md.
//
//   raw rows ──▶ fp32 ──▶ rotated, 4 rows x 4 vectors of channels at a time ──▶ packed
//                              └── keys: mean per block ──▶ packed
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/encode/pack_row-inl.h"
#include "kernels/cpu/encode/rotate-inl.h"
#include "kernels/format/part.h"
#include "kernels/format/rotation.h"

namespace tessera::kernels {
namespace {

// The output of prepare_encode: this header, then the transposed rotations of K and V, if any. For
// fp32: per dimension a padded row of channels. For pair dots: per two dimensions a padded row of
// bf16 pairs. V's offset always leaves room for K in fp32. Then, for rows that are centred, per
// side kMaxHeadDim floats: the mean, or for pair dots the rotated mean.
struct Prepared {
  std::uint32_t rotates_keys;
  std::uint32_t rotates_values;
  std::uint32_t pairs;
  std::uint32_t centred_keys;
  std::uint32_t centred_values;
  std::uint32_t reserved[11];
};
static_assert(sizeof(Prepared) == 64);

// The offset of one side's rotation in the prepared buffer.
TESSERA_SIMD std::size_t PreparedOffset(const TileShape& shape, bool value) {
  const auto keys = static_cast<std::size_t>(PaddedOf(shape.key));
  return sizeof(Prepared) + (value ? sizeof(float) * shape.head_dim * keys : 0);
}

TESSERA_SIMD std::size_t MeanOffset(const TileShape& shape, bool value) {
  const auto values = static_cast<std::size_t>(PaddedOf(shape.value));
  return PreparedOffset(shape, true) + sizeof(float) * shape.head_dim * values +
         (value ? sizeof(float) * kMaxHeadDim : 0);
}

static std::size_t PreparedBytesSimd(const TileShape& shape, ElementType) {
  return MeanOffset(shape, true) + sizeof(float) * kMaxHeadDim;
}

#if defined(TESSERA_DOT_ENGINE)
TESSERA_SIMD bool UsesPairs(ElementType rows, ElementType rotation) {
  return rows == ElementType::kBf16 && rotation == ElementType::kBf16;
}
#else
TESSERA_SIMD bool UsesPairs(ElementType, ElementType) { return false; }
#endif

TESSERA_SIMD void Transpose(const TileShape& shape, const RowShape& side, const std::byte* rotation,
                            ElementType type, const Prepared& what, std::byte* to) {
  const int head_dim = shape.head_dim;
  const int padded = PaddedOf(side);
  const std::size_t row_bytes =
      shape.head_dim * (type == ElementType::kFp32 ? std::size_t{4} : std::size_t{2});
  alignas(64) float row[kMaxHeadDim];
  for (int c = 0; c < padded; ++c) {
    for (int d = 0; d < head_dim; ++d) row[d] = 0;
    if (c < side.channels)
      WidenRow(type, rotation + static_cast<std::size_t>(c) * row_bytes, head_dim, row);
    for (int d = 0; d < head_dim; ++d) {
      if (what.pairs != 0) {
        const auto bits =
            static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, row[d]) >> 16);
        __builtin_memcpy(to + ((d / 2) * padded + c) * 4 + d % 2 * 2, &bits, sizeof(bits));
      } else {
        __builtin_memcpy(to + (d * padded + c) * 4, row + d, sizeof(float));
      }
    }
  }
}

// Stores a side's mean, rotated if rows are centred after rotation.
TESSERA_SIMD void PrepareMean(const TileShape& shape, const std::byte* rotation,
                              const std::byte* mean, bool rotated, std::byte* to) {
  const int head_dim = shape.head_dim;
  const std::size_t row_bytes = shape.head_dim * std::size_t{2};
  alignas(64) float means[kMaxHeadDim];
  alignas(64) float row[kMaxHeadDim];
  alignas(64) float out[kMaxHeadDim] = {};
  WidenRow(ElementType::kBf16, mean, head_dim, means);
  for (int c = 0; c < head_dim; ++c) {
    out[c] = means[c];
    if (!rotated) continue;
    WidenRow(ElementType::kBf16, rotation + static_cast<std::size_t>(c) * row_bytes, head_dim, row);
    double sum = 0;
    for (int d = 0; d < head_dim; ++d) sum += static_cast<double>(row[d]) * means[d];
    out[c] = static_cast<float>(sum);
  }
  __builtin_memcpy(to, out, sizeof(out));
}

static void PrepareEncodeSimd(const TileShape& shape, ElementType row_type,
                              const RotationView& rotation, std::byte* prepared) {
  Prepared what = {};
  what.rotates_keys = rotation.key != nullptr ? 1 : 0;
  const bool packed = shape.format >= TileFormat::kPackedBf16;
  what.rotates_values = packed && rotation.value != nullptr ? 1 : 0;
  what.centred_keys = rotation.key_mean != nullptr ? 1 : 0;
  what.centred_values = packed && rotation.value_mean != nullptr ? 1 : 0;
  what.pairs = UsesPairs(row_type, rotation.type) ? 1 : 0;
  __builtin_memcpy(prepared, &what, sizeof(what));
  if (what.rotates_keys != 0) {
    Transpose(shape, shape.key, rotation.key, rotation.type, what,
              prepared + PreparedOffset(shape, false));
  }
  if (what.rotates_values != 0) {
    Transpose(shape, shape.value, rotation.value, rotation.type, what,
              prepared + PreparedOffset(shape, true));
  }
  if (what.centred_keys != 0) {
    PrepareMean(shape, rotation.key, rotation.key_mean, what.pairs != 0,
                prepared + MeanOffset(shape, false));
  }
  if (what.centred_values != 0) {
    PrepareMean(shape, rotation.value, rotation.value_mean, what.pairs != 0,
                prepared + MeanOffset(shape, true));
  }
}

constexpr int kRotatedRows = 4;
constexpr int kRotatedVectors = Simd::kLanes == 16 ? 4 : 2;

// out[r][c ..] = sum over steps of step(rows[r], i) x matrix[i][c ..], kRotatedRows rows at once.
template <int kVectors, class Step>
TESSERA_SIMD void MultiplyBlock(const std::byte* matrix, int steps, int padded, int c, Step step,
                                float* const (&out)[kRotatedRows]) {
  typename Simd::Floats sum[kRotatedRows][kVectors];
  TESSERA_UNROLL for (int r = 0; r < kRotatedRows; ++r) {
    TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = Simd::Zero();
  }
  const std::byte* line = matrix + 4 * c;
  for (int i = 0; i < steps; ++i, line += 4 * padded) {
    step(i, line, sum);
  }
  TESSERA_UNROLL for (int r = 0; r < kRotatedRows; ++r) {
    TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
      Simd::Store(out[r] + c + v * Simd::kLanes, sum[r][v]);
    }
  }
}

template <class Block>
TESSERA_SIMD void ForEachChannelBlock(int padded, Block block) {
  constexpr int kWide = kRotatedVectors * Simd::kLanes;
  int c = 0;
  for (; c + kWide <= padded; c += kWide) block.template operator()<kRotatedVectors>(c);
  for (; c < padded; c += kPairChannels) block.template operator()<2>(c);
}

// Multiplies fp32 rows, [count][head_dim], with the transposed rotation.
TESSERA_SIMD void MultiplyFloats(const std::byte* matrix, const FloatRows& rows, int count,
                                 int head_dim, int padded, FloatRows& rotated) {
  for (int first = 0; first < count; first += kRotatedRows) {
    const float* from[kRotatedRows];
    float* out[kRotatedRows];
    for (int r = 0; r < kRotatedRows; ++r) {
      const int row = first + r < count ? first + r : count - 1;
      from[r] = rows.rows[row];
      out[r] = rotated.rows[row];
    }
    ForEachChannelBlock(padded, [&]<int kVectors>(int c) TESSERA_INLINE_LAMBDA {
      MultiplyBlock<kVectors>(
          matrix, head_dim, padded, c,
          [&](int i, const std::byte* line, auto& sum) TESSERA_INLINE_LAMBDA {
            const auto* row = reinterpret_cast<const float*>(line);
            typename Simd::Floats vectors[kVectors];
            TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
              vectors[v] = Simd::Load(row + v * Simd::kLanes);
            }
            TESSERA_UNROLL for (int r = 0; r < kRotatedRows; ++r) {
              const auto element = Simd::Splat(from[r][i]);
              TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
                sum[r][v] = Simd::MultiplyAdd(element, vectors[v], sum[r][v]);
              }
            }
          },
          out);
    });
  }
}

#if defined(TESSERA_DOT_ENGINE)
// Multiplies raw bf16 rows. bf16 products are exact, so this rounds no more than fp32 does.
TESSERA_SIMD void MultiplyPairs(const std::byte* matrix, const EncodeJob& job, const std::byte* raw,
                                int padded, FloatRows& rotated) {
  const auto count = static_cast<int>(job.rows);
  for (int first = 0; first < count; first += kRotatedRows) {
    const std::byte* from[kRotatedRows];
    float* out[kRotatedRows];
    for (int r = 0; r < kRotatedRows; ++r) {
      const int row = first + r < count ? first + r : count - 1;
      from[r] = raw + static_cast<std::size_t>(row) * job.stride;
      out[r] = rotated.rows[row];
    }
    ForEachChannelBlock(padded, [&]<int kVectors>(int c) TESSERA_INLINE_LAMBDA {
      MultiplyBlock<kVectors>(
          matrix, job.shape.head_dim / 2, padded, c,
          [&](int i, const std::byte* line, auto& sum) TESSERA_INLINE_LAMBDA {
            typename Simd::Words vectors[kVectors];
            TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
              vectors[v] = Simd::LoadWords(line + 64 * v);
            }
            TESSERA_UNROLL for (int r = 0; r < kRotatedRows; ++r) {
              float pair;
              __builtin_memcpy(&pair, from[r] + 4 * i, sizeof(pair));
              const auto element = Simd::SplatPair(&pair);
              TESSERA_UNROLL for (int v = 0; v < kVectors; ++v) {
                sum[r][v] = Simd::AddPairDots(sum[r][v], element, vectors[v]);
              }
            }
          },
          out);
    });
  }
}
#endif

struct EncodeScratch {
  FloatRows raw;
  FloatRows keys;
  FloatRows values;
};

TESSERA_SIMD void SubtractRow(const float* less, int head_dim, float* row) {
  for (int c = 0; c < head_dim; c += Simd::kLanes) {
    Simd::Store(row + c, Simd::Subtract(Simd::Load(row + c), Simd::Load(less + c)));
  }
}

// Rotates raw rows, K or V, into the space of the tile.
TESSERA_SIMD void RotateTile(const EncodeJob& job, const std::byte* raw, bool value,
                             EncodeScratch& scratch, FloatRows& rotated) {
  const int padded = PaddedOf(value ? job.shape.value : job.shape.key);
  const int head_dim = job.shape.head_dim;
  Prepared what = {};
  if (job.shape.format >= TileFormat::kPackedBf16 || job.shape.summary == Summary::kSigns) {
    __builtin_memcpy(&what, job.prepared, sizeof(what));
  }
  if ((value ? what.rotates_values : what.rotates_keys) == 0) {
    for (std::uint32_t r = 0; r < job.rows; ++r) {
      WidenRow(job.type, raw + r * job.stride, head_dim, rotated.rows[r]);
    }
    return;
  }
  const std::byte* matrix = job.prepared + PreparedOffset(job.shape, value);
  const bool centred = (value ? what.centred_values : what.centred_keys) != 0;
  const auto* mean = reinterpret_cast<const float*>(job.prepared + MeanOffset(job.shape, value));
#if defined(TESSERA_DOT_ENGINE)
  if (what.pairs != 0) {
    MultiplyPairs(matrix, job, raw, padded, rotated);
    for (std::uint32_t r = 0; centred && r < job.rows; ++r) {
      SubtractRow(mean, head_dim, rotated.rows[r]);
    }
    return;
  }
#endif
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    WidenRow(job.type, raw + r * job.stride, head_dim, scratch.raw.rows[r]);
    if (centred) SubtractRow(mean, head_dim, scratch.raw.rows[r]);
  }
  MultiplyFloats(matrix, scratch.raw, static_cast<int>(job.rows), head_dim, padded, rotated);
}

// ---- summaries ----

// Converts `count` floats to elements of `type`.
TESSERA_SIMD void StoreElements(ElementType type, const float* row, int count, std::byte* to) {
  const std::size_t elements = static_cast<std::size_t>(count);
  alignas(64) std::uint16_t words[2 * kMaxHeadDim];
  switch (type) {
    case ElementType::kFp32:
      __builtin_memcpy(to, row, elements * sizeof(float));
      return;
    case ElementType::kFp16:
      Simd::ToFp16(row, (count + 15) / 16 * 16, words);
      break;
    case ElementType::kBf16:
      ToBf16Values(row, count, words);
      break;
  }
  __builtin_memcpy(to, words, elements * 2);
}

// The mean of rows [first, first + entries), summed in double.
TESSERA_SIMD void MeanOf(const FloatRows& rows, int first, int entries, int padded, float* mean) {
  alignas(64) double sum[kMaxHeadDim];
  for (int c = 0; c < padded; ++c) sum[c] = 0;
  for (int e = 0; e < entries; ++e) {
    for (int c = 0; c < padded; ++c) sum[c] += rows.rows[first + e][c];
  }
  for (int c = 0; c < padded; ++c) mean[c] = static_cast<float>(sum[c] / entries);
}

// The largest bf16 not above the value.
TESSERA_SIMD float FloorToBf16(float value) {
  auto bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t below = (bits & 0xffffu) != 0 && bits >> 31 != 0 ? 0x10000u : 0u;
  bits = (bits & 0xffff0000u) + below;
  return __builtin_bit_cast(float, bits);
}

TESSERA_SIMD void StoreMinMax(const TileShape& shape, const FloatRows& stored, int first,
                              int entries, std::byte* to) {
  const int channels = shape.key.channels;
  const bool packed = shape.format >= TileFormat::kPackedBf16;
  const ElementType type = packed ? ElementType::kBf16 : static_cast<ElementType>(shape.format);
  alignas(64) float bounds[2 * kMaxHeadDim + 16];
  for (int c = 0; c < channels; ++c) {
    float least = stored.rows[first][c];
    float greatest = least;
    for (int e = 1; e < entries; ++e) {
      const float element = stored.rows[first + e][c];
      least = element < least ? element : least;
      greatest = element > greatest ? element : greatest;
    }
    least += 0.0f;  // never -0
    greatest += 0.0f;
    bounds[c] = packed ? FloorToBf16(least) : least;
    bounds[channels + c] = packed ? -FloorToBf16(-greatest) + 0.0f : greatest;
  }
  StoreElements(type, bounds, 2 * channels, to);
}

// Means are taken of `keys`; min/max bounds of `stored`, the tile's keys as they will be read back.
TESSERA_SIMD void StoreSummaries(const TileShape& shape, const TileLayout& layout,
                                 std::uint32_t rows, const FloatRows& keys, const FloatRows& stored,
                                 std::byte* summaries) {
  if (shape.summary == Summary::kNone) return;
  __builtin_memset(summaries, 0, layout.summary_bytes);
  const int padded = PaddedOf(shape.key);
  const int block = shape.block;
  const int blocks = (static_cast<int>(rows) + block - 1) / block;
  FloatRows means;
  for (int b = 0; b < blocks; ++b) {
    const int left = static_cast<int>(rows) - b * block;
    const int entries = left < block ? left : block;
    std::byte* data =
        summaries + layout.block_data + static_cast<std::size_t>(b) * layout.block_row.data;
    if (shape.summary == Summary::kMinMax) {
      StoreMinMax(shape, stored, b * block, entries, data);
      continue;
    }
    MeanOf(keys, b * block, entries, padded, means.rows[b]);
    if (shape.format < TileFormat::kPackedBf16) {
      StoreElements(static_cast<ElementType>(shape.format), means.rows[b], shape.key.channels,
                    data);
    }
  }
  if (shape.summary != Summary::kMean || shape.format < TileFormat::kPackedBf16) return;
  WithValues(shape, [&]<ValueType kValues, int kGroup>() {
    PackRows<kValues, kGroup>(shape.key, layout.block_row, means, blocks, [&](int b) {
      const auto at = static_cast<std::size_t>(b);
      return PackTarget{summaries + layout.block_bits + at * layout.block_row.bits,
                        summaries + layout.block_scales + at * layout.block_row.scale,
                        summaries + layout.block_data + at * layout.block_row.data};
    });
  });
}

}  // namespace
}  // namespace tessera::kernels
