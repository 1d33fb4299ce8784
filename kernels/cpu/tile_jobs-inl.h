// Encodes, decodes and gathers whole tiles, and sums the moments of rows. Written over the
// including file's `Simd`. Internal linkage throughout: see README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/encode/encode-inl.h"
#include "kernels/cpu/encode/encode_planes-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Stored rows [0, count) in fp32, with dropped channels 0. `values` selects V instead of K.
TESSERA_SIMD void ReadStored(const TileShape& shape, const TileLayout& layout,
                             const std::byte* tile, std::uint32_t count, bool values, float* to,
                             std::uint32_t padded) {
  if (shape.format < TileFormat::kPackedBf16) {
    const std::byte* row = tile + (values ? layout.value_data : layout.key_data);
    for (std::uint32_t r = 0; r < count; ++r, row += layout.key_row.data, to += padded) {
      WidenRow(static_cast<ElementType>(shape.format), row, shape.head_dim, to);
    }
    return;
  }
  const PackedRows rows = values ? ValuesOfTile(shape, layout, tile) : KeysOf(shape, layout, tile);
  WithValues(shape, [&]<ValueType kValues, int kGroup>() {
    alignas(64) std::byte words[2 * kMaxHeadDim];
    for (std::uint32_t r = 0; r < count; ++r) {
      ExpandRows<kValues, kGroup>(rows, r, 1, static_cast<int>(padded), words);
      float* row = to + r * padded;
      Widen<kExpandedType<kValues>>(words, static_cast<int>(padded), row);
      if constexpr (kValueBytes<kValues> == 1) {
        float scale;
        ReadScales(rows, r, 1, &scale);
        const auto factor = Simd::Splat(scale);
        for (std::uint32_t c = 0; c < padded; c += Simd::kLanes) {
          Simd::Store(row + c, Simd::Multiply(Simd::Load(row + c), factor));
        }
      }
    }
  });
}

// The stored keys, in rows of kMaxHeadDim floats.
TESSERA_SIMD void ReadStoredKeys(const TileShape& shape, const TileLayout& layout,
                                 const std::byte* tile, std::uint32_t count, FloatRows& rows) {
  for (std::uint32_t r = 0; r < count; ++r) {
    // One row at a time, because the target's stride exceeds a tile's padding.
    const TileLayout at = [&] {
      TileLayout moved = layout;
      moved.key_bits += r * layout.key_row.bits;
      moved.key_scales += r * layout.key_row.scale;
      moved.key_data += r * layout.key_row.data;
      return moved;
    }();
    ReadStored(shape, at, tile, 1, false, rows.rows[r],
               static_cast<std::uint32_t>(PaddedOf(shape.key)));
  }
}

TESSERA_SIMD void StoreWordsOfRow(const TileShape& shape, const TileLayout& layout,
                                  std::uint32_t row, float weight, std::uint32_t position,
                                  std::byte* tile) {
  if (shape.weights) {
    __builtin_memcpy(tile + layout.weights + row * sizeof(weight), &weight, sizeof(weight));
  }
  if (shape.positions) {
    __builtin_memcpy(tile + layout.positions + row * sizeof(position), &position, sizeof(position));
  }
}

template <ValueType kValues, int kGroup>
TESSERA_SIMD bool PackKeysAndValues(const EncodeJob& job, const EncodeScratch& scratch) {
  const TileLayout& layout = job.layout;
  const auto rows = static_cast<int>(job.rows);
  const auto place = [&job](std::uint32_t bits, std::uint32_t scales, std::uint32_t data,
                            const RowBytes& row) {
    return [&job, &row, bits, scales, data](int r) {
      const auto at = static_cast<std::size_t>(r);
      return PackTarget{job.tile + bits + at * row.bits, job.tile + scales + at * row.scale,
                        job.tile + data + at * row.data};
    };
  };
  return PackRows<kValues, kGroup>(
             job.shape.key, layout.key_row, scratch.keys, rows,
             place(layout.key_bits, layout.key_scales, layout.key_data, layout.key_row)) &&
         PackRows<kValues, kGroup>(
             job.shape.value, layout.value_row, scratch.values, rows,
             place(layout.value_bits, layout.value_scales, layout.value_data, layout.value_row));
}

TESSERA_SIMD bool AllFinite(const FloatRows& rows, std::uint32_t count, int channels) {
  for (std::uint32_t r = 0; r < count; ++r) {
    if (PeakBits(rows.rows[r], channels) >= kInfinityBits) return false;
  }
  return true;
}

static bool EncodeSimd(const EncodeJob& job) {
  EncodeScratch scratch;
  const TileLayout& layout = job.layout;
  const bool packed = job.shape.format >= TileFormat::kPackedBf16;
  __builtin_memset(job.tile, 0, layout.bytes);
  RotateTile(job, job.key, false, scratch, scratch.keys);
  RotateTile(job, job.value, true, scratch, scratch.values);
  if (job.shape.format == TileFormat::kPlanes) {
    if (!EncodeQuads(job, scratch)) return false;
  } else if (packed) {
    bool finite = true;
    WithValues(job.shape, [&]<ValueType kValues, int kGroup>() {
      finite = PackKeysAndValues<kValues, kGroup>(job, scratch);
    });
    if (!finite) return false;
  } else {
    if (!AllFinite(scratch.keys, job.rows, job.shape.head_dim) ||
        !AllFinite(scratch.values, job.rows, job.shape.head_dim)) {
      return false;
    }
    for (std::uint32_t r = 0; r < job.rows; ++r) {
      const std::uint32_t bytes = layout.key_row.data;  // value rows have the same size
      __builtin_memcpy(job.tile + layout.key_data + r * bytes, job.key + r * job.stride, bytes);
      __builtin_memcpy(job.tile + layout.value_data + r * bytes, job.value + r * job.stride, bytes);
    }
  }
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    StoreWordsOfRow(job.shape, layout, r, job.weights == nullptr ? 1.0f : job.weights[r],
                    job.positions == nullptr ? r : job.positions[r], job.tile);
  }
  if (job.shape.summary == Summary::kSigns) {
    StoreSigns(job.shape, layout, scratch.keys, job.rows, job.summaries);
  } else if (job.shape.summary == Summary::kMinMax && packed) {
    ReadStoredKeys(job.shape, layout, job.tile, job.rows, scratch.raw);
    StoreSummaries(job.shape, layout, job.rows, scratch.keys, scratch.raw, job.summaries);
  } else {
    StoreSummaries(job.shape, layout, job.rows, scratch.keys, scratch.keys, job.summaries);
  }
  return true;
}

static void DecodeSimd(const DecodeJob& job) {
  if (job.shape.format == TileFormat::kPlanes) return DecodeQuads(job);
  ReadStored(job.shape, job.layout, job.tile, job.rows, false, job.keys, job.padded_channels);
  ReadStored(job.shape, job.layout, job.tile, job.rows, true, job.values, job.padded_channels);
}

static void GatherSimd(const GatherJob& job) {
  const TileLayout& from = job.from_layout;
  const TileLayout& to = job.to_layout;
  __builtin_memset(job.tile, 0, to.bytes);
  if (job.to.format == TileFormat::kPlanes) GatherQuads(job);
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const GatherRow& source = job.rows[r];
    const auto copy = [&](std::uint32_t target, std::uint32_t origin, std::uint32_t bytes) {
      __builtin_memcpy(job.tile + target + r * bytes, source.tile + origin + source.row * bytes,
                       bytes);
    };
    copy(to.key_bits, from.key_bits, to.key_row.bits);
    copy(to.key_scales, from.key_scales, to.key_row.scale);
    copy(to.key_data, from.key_data, to.key_row.data);
    copy(to.value_bits, from.value_bits, to.value_row.bits);
    copy(to.value_scales, from.value_scales, to.value_row.scale);
    copy(to.value_data, from.value_data, to.value_row.data);
    float weight = 1.0f;
    if (job.from.weights) {
      __builtin_memcpy(&weight, source.tile + from.weights + source.row * sizeof(weight),
                       sizeof(weight));
    }
    StoreWordsOfRow(job.to, to, r, weight, source.position, job.tile);
  }
  if (job.to.summary == Summary::kNone) return;
  if (job.to.summary == Summary::kSigns) return GatherSigns(job);
  FloatRows stored;
  ReadStoredKeys(job.to, to, job.tile, job.row_count, stored);
  StoreSummaries(job.to, to, job.row_count, stored, stored, job.summaries);
}

// ---- moments ----

// Squares of values from here on might overflow when 32 of them are summed in fp32.
constexpr std::uint32_t kLargeBits = 0x5c800000;  // 2^58

TESSERA_SIMD void AddMomentsInDouble(const MomentsJob& job, const FloatRows& rows) {
  for (std::uint32_t i = 0; i < job.head_dim; ++i) {
    for (std::uint32_t j = i; j < job.head_dim; ++j) {
      double sum = 0;
      for (std::uint32_t r = 0; r < job.row_count; ++r) {
        sum += static_cast<double>(rows.rows[r][i]) * rows.rows[r][j];
      }
      job.sums[i * job.head_dim + j] += sum;
    }
  }
}

// Sums up to 32 rows in fp32, then adds the result in double.
TESSERA_SIMD void AddMoments(const MomentsJob& job, const FloatRows& rows) {
  constexpr auto kLanes = static_cast<std::uint32_t>(Simd::kLanes);
  constexpr std::uint32_t kRowsAtOnceHere = 4;
  for (std::uint32_t i = 0; i < job.head_dim; i += kRowsAtOnceHere) {
    for (std::uint32_t j = i / kLanes * kLanes; j < job.head_dim; j += kLanes) {
      typename Simd::Floats sum[kRowsAtOnceHere];
      TESSERA_UNROLL for (auto& each : sum) each = Simd::Zero();
      for (std::uint32_t r = 0; r < job.row_count; ++r) {
        const auto vector = Simd::Load(rows.rows[r] + j);
        TESSERA_UNROLL for (std::uint32_t k = 0; k < kRowsAtOnceHere; ++k) {
          sum[k] = Simd::MultiplyAdd(Simd::Splat(rows.rows[r][i + k]), vector, sum[k]);
        }
      }
      for (std::uint32_t k = 0; k < kRowsAtOnceHere; ++k) {
        alignas(64) float lanes[Simd::kLanes];
        Simd::Store(lanes, sum[k]);
        double* target = job.sums + (i + k) * job.head_dim + j;
        const std::uint32_t first = i + k > j ? i + k - j : 0;  // the diagonal
        for (std::uint32_t lane = first; lane < kLanes; ++lane) target[lane] += lanes[lane];
      }
    }
  }
}

static void MomentsSimd(const MomentsJob& job) {
  FloatRows rows;
  MomentsJob tile = job;
  for (std::uint32_t done = 0; done < job.row_count; done += kTileRows) {
    const std::uint32_t left = job.row_count - done;
    tile.row_count = left < kTileRows ? left : kTileRows;
    bool large = false;
    for (std::uint32_t r = 0; r < tile.row_count; ++r) {
      WidenRow(job.type, job.rows + (done + r) * job.stride, static_cast<int>(job.head_dim),
               rows.rows[r]);
      large |= PeakBits(rows.rows[r], static_cast<int>(job.head_dim)) >= kLargeBits;
    }
    if (large) {
      AddMomentsInDouble(tile, rows);
    } else {
      AddMoments(tile, rows);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
