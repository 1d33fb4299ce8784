// Encodes, decodes and gathers planes and their sign index. Written over the including file's
// `Simd` and `ByteSimd`. Internal linkage throughout: see ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/encode/encode-inl.h"
#include "kernels/cpu/encode/quad_codes-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Sums of a plane over one row, with t the row in units of its step and y its centred codes.
constexpr int kYt = 0;
constexpr int kYy = 1;
constexpr int kTt = 2;
constexpr int kStatistics = 4;  // the last is unused

struct PlaneSums {
  alignas(64) float sums[kStatistics][kQuadRowsHere];
};

// Adds up the lanes of four vectors per statistic.
TESSERA_SIMD void SumStatistics(const typename Simd::Floats (&lanes)[kStatistics][kQuadRowsHere],
                                PlaneSums& out) {
  constexpr int kBlocks = Simd::kLanes / 4;
  for (int i = 0; i < kStatistics; i += kBlocks) {
    typename Simd::Floats blocks[kBlocks];
    TESSERA_UNROLL for (int b = 0; b < kBlocks; ++b) {
      blocks[b] =
          Simd::SumBlocks(lanes[i + b][0], lanes[i + b][1], lanes[i + b][2], lanes[i + b][3]);
    }
    Simd::Store(out.sums[i], Simd::SumAcross(blocks));
  }
}

struct RowErrors {
  double error[kQuadRowsHere];
  double energy[kQuadRowsHere];
};

// Codes of channels [first, first + channels) of four rows.
TESSERA_PER_PASS void CodePlane(const float* const* rows, int first, const QuadPlane& plane, int p,
                                QuadCodes& quad, RowErrors& errors) {
  const float half = static_cast<float>(1 << (plane.width - 1));
  float step[kQuadRowsHere];
  typename Simd::Floats lanes[kStatistics][kQuadRowsHere];
  const auto most = Simd::Splat(2 * half - 1);
  const auto centre = Simd::Splat(plane.centre);
  TESSERA_UNROLL for (int r = 0; r < kQuadRowsHere; ++r) {
    const float* z = rows[r] + first;
    auto peak = Simd::Zero();
    for (int c = 0; c < plane.channels; c += Simd::kLanes) {
      peak = Simd::Max(peak, Simd::Absolute(Simd::Load(z + c)));
    }
    const float top = Simd::MaxLane(peak);
    const bool empty = !(top >= kSmallestScaledPeak);
    step[r] = empty ? 0 : top / half;
    const auto inverse = Simd::Splat(empty ? 0 : half / top);
    auto yt = Simd::Zero();
    auto yy = Simd::Zero();
    auto tt = Simd::Zero();
    for (int c = 0; c < plane.channels; c += Simd::kLanes) {
      const auto t = Simd::Multiply(Simd::Load(z + c), inverse);
      auto code = Simd::Add(ByteSimd::Floor(t), Simd::Splat(half));
      code = Simd::Min(Simd::Max(code, Simd::Zero()), most);
      ByteSimd::StoreRounded(quad.codes[r] + first + c, code);
      const auto y = Simd::Subtract(code, centre);
      yt = Simd::MultiplyAdd(y, t, yt);
      yy = Simd::MultiplyAdd(y, y, yy);
      tt = Simd::MultiplyAdd(t, t, tt);
    }
    lanes[kYt][r] = yt;
    lanes[kYy][r] = yy;
    lanes[kTt][r] = tt;
    lanes[kStatistics - 1][r] = Simd::Zero();
  }
  PlaneSums sums;
  SumStatistics(lanes, sums);
  for (int r = 0; r < kQuadRowsHere; ++r) {
    const float yt = sums.sums[kYt][r];
    const float yy = sums.sums[kYy][r];
    const float units = yt > 0 ? yt / yy : 0;
    const std::uint16_t scale = ToBf16(step[r] * units);
    quad.scales[p][r] = scale;
    const double used = step[r] > 0 ? static_cast<double>(FromBf16(scale)) / step[r] : 0;
    const double square = static_cast<double>(step[r]) * step[r];
    errors.error[r] += square * (sums.sums[kTt][r] - used * (2 * yt - used * yy));
    errors.energy[r] += square * sums.sums[kTt][r];
  }
}

// Encodes one side of the four rows from `first` on. False if a row is refused.
TESSERA_PER_PASS bool EncodeQuadSide(const QuadSide& side, bool keys, const FloatRows& rows,
                                     std::uint32_t first, std::uint32_t count, int head_dim,
                                     float error_limit, std::byte* to) {
  const float* four[kQuadRowsHere];
  RowErrors errors = {};
  for (std::uint32_t r = 0; r < kQuadRows; ++r) {
    four[r] = rows.rows[first + (r < count ? r : count - 1)];
    if (PeakBits(four[r], head_dim) >= kInfinityBits) return false;
  }
  QuadCodes quad;
  int channel = 0;
  for (int p = 0; p < side.planes; ++p) {
    CodePlane(four, channel, side.plane[p], p, quad, errors);
    channel += side.plane[p].channels;
  }
  for (std::uint32_t r = 0; r < kQuadRows; ++r) {
    if (errors.error[r] > static_cast<double>(error_limit) &&
        errors.error[r] > static_cast<double>(kRefusedShare) * errors.energy[r]) {
      return false;
    }
  }
  for (std::uint32_t r = count; r < kQuadRows; ++r) {
    __builtin_memset(quad.codes[r], 0, sizeof(quad.codes[r]));
    for (auto& scales : quad.scales) scales[r] = 0;
  }
  WriteQuadSide(side, keys, quad, to);
  return true;
}

TESSERA_PER_PASS bool EncodeQuads(const EncodeJob& job, const EncodeScratch& scratch) {
  const QuadSide keys = SideOf(job.shape, job.layout, true);
  const QuadSide values = SideOf(job.shape, job.layout, false);
  for (std::uint32_t first = 0; first < job.rows; first += kQuadRows) {
    const std::uint32_t left = job.rows - first;
    const std::uint32_t count = left < kQuadRows ? left : kQuadRows;
    std::byte* quad =
        job.tile + static_cast<std::size_t>(first / kQuadRows) * job.layout.quad.bytes;
    if (!EncodeQuadSide(keys, true, scratch.keys, first, count, job.shape.head_dim,
                        job.key_error_limit, quad) ||
        !EncodeQuadSide(values, false, scratch.values, first, count, job.shape.head_dim,
                        job.value_error_limit, quad)) {
      return false;
    }
  }
  return true;
}

// ---- signs ----

// Signs and norms of rotated keys.
TESSERA_PER_PASS void StoreSigns(const TileShape& shape, const TileLayout& layout,
                                 const FloatRows& keys, std::uint32_t rows, std::byte* summaries) {
  __builtin_memset(summaries, 0, layout.summary_bytes);
  const int head_dim = shape.head_dim;
  const auto bytes = static_cast<std::size_t>(head_dim / 16);
  alignas(64) float norms[kTileRows] = {};
  for (std::uint32_t first = 0; first < rows; first += kQuadRows) {
    typename Simd::Floats lanes[kStatistics][kQuadRowsHere];
    TESSERA_UNROLL for (std::uint32_t r = 0; r < kQuadRows; ++r) {
      TESSERA_UNROLL for (auto& statistic : lanes) statistic[r] = Simd::Zero();
      if (first + r >= rows) continue;
      const float* z = keys.rows[first + r];
      for (int c = 0; c < head_dim; c += Simd::kLanes) {
        lanes[0][r] = Simd::Add(lanes[0][r], Simd::Absolute(Simd::Load(z + c)));
      }
      std::byte* bits = summaries + layout.block_bits + (first + r) * bytes;
      for (int c = 0; c < head_dim / 2; c += Simd::kLanes) {
        const std::uint32_t set = ByteSimd::NotNegativeBits(Simd::Load(z + c));
        __builtin_memcpy(bits + c / 8, &set, Simd::kLanes / 8);
      }
    }
    PlaneSums sums;
    SumStatistics(lanes, sums);
    __builtin_memcpy(norms + first, sums.sums[0], sizeof(sums.sums[0]));
  }
  const auto scale = Simd::Splat(1 / static_cast<float>(head_dim));
  for (int i = 0; i < kTileRows; i += Simd::kLanes) {
    const auto mean = Simd::Multiply(Simd::Load(norms + i), scale);
    auto k = Simd::Multiply(Simd::Add(Log2<Simd>(mean), Simd::Splat(16.0f)), Simd::Splat(8.0f));
    k = Simd::Min(Simd::Max(k, Simd::Splat(1.0f)), Simd::Splat(255.0f));
    std::uint8_t rounded[Simd::kLanes];
    ByteSimd::StoreRounded(rounded, k);
    for (int r = i; r < i + Simd::kLanes && r < static_cast<int>(rows); ++r) {
      summaries[layout.block_data + static_cast<std::uint32_t>(r)] =
          std::byte{norms[r] > 0 ? rounded[r - i] : std::uint8_t{0}};
    }
  }
}

// ---- decode and gather ----

TESSERA_PER_PASS void DecodeQuads(const DecodeJob& job) {
  const QuadSide keys = SideOf(job.shape, job.layout, true);
  const QuadSide values = SideOf(job.shape, job.layout, false);
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    const std::byte* quad =
        job.tile + static_cast<std::size_t>(r / kQuadRows) * job.layout.quad.bytes;
    const std::size_t at = static_cast<std::size_t>(r) * job.padded_channels;
    DecodeQuadRow(keys, true, quad, static_cast<int>(r % kQuadRows), job.keys + at);
    DecodeQuadRow(values, false, quad, static_cast<int>(r % kQuadRows), job.values + at);
  }
}

TESSERA_PER_PASS void GatherQuadSide(const GatherJob& job, bool is_key) {
  const QuadSide from = SideOf(job.from, job.from_layout, is_key);
  const QuadSide to = SideOf(job.to, job.to_layout, is_key);
  for (std::uint32_t first = 0; first < job.row_count; first += kQuadRows) {
    QuadCodes quad;
    __builtin_memset(&quad, 0, sizeof(quad));
    for (std::uint32_t r = first; r < job.row_count && r < first + kQuadRows; ++r) {
      const GatherRow& source = job.rows[r];
      const std::byte* at = source.tile + static_cast<std::size_t>(source.row / kQuadRows) *
                                              job.from_layout.quad.bytes;
      CopyQuadRow(from, at, static_cast<int>(source.row % kQuadRows), is_key, to,
                  static_cast<int>(r - first), quad);
    }
    WriteQuadSide(
        to, is_key, quad,
        job.tile + static_cast<std::size_t>(first / kQuadRows) * job.to_layout.quad.bytes);
  }
}

TESSERA_SIMD void GatherQuads(const GatherJob& job) {
  GatherQuadSide(job, /*is_key=*/true);
  GatherQuadSide(job, /*is_key=*/false);
}

TESSERA_PER_PASS void GatherSigns(const GatherJob& job) {
  __builtin_memset(job.summaries, 0, job.to_layout.summary_bytes);
  const std::size_t bytes = job.to.head_dim / 16;
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const GatherRow& source = job.rows[r];
    __builtin_memcpy(job.summaries + job.to_layout.block_bits + r * bytes,
                     source.summaries + job.from_layout.block_bits + source.row * bytes, bytes);
    job.summaries[job.to_layout.block_data + r] =
        source.summaries[job.from_layout.block_data + source.row];
  }
}

}  // namespace
}  // namespace tessera::kernels
