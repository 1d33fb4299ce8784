// Rotates queries into a segment's space, and outputs back. Written over the including file's
// `Simd`. Internal linkage throughout: see ../README.md.
//
// A rotation is treated as a tile. Its rows act as keys when a query is rotated, and as values,
// weighted by the rotated output, when an output is rotated back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_packed-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

// Converts a row to fp32 in channel order.
template <ElementType kType>
TESSERA_SIMD void Widen(const std::byte* row, int head_dim, float* to) {
  for (int c = 0; c < head_dim; c += kPairChannels) {
    const auto pair = Simd::template InOrder<kType>(
        Simd::template LoadPair<kType>(row + c * kElementBytes<kType>));
    Simd::Store(to + c, pair.a);
    Simd::Store(to + c + Simd::kLanes, pair.b);
  }
}

TESSERA_SIMD void WidenRow(ElementType type, const std::byte* row, int head_dim, float* to) {
  switch (type) {
    case ElementType::kBf16:
      return Widen<ElementType::kBf16>(row, head_dim, to);
    case ElementType::kFp16:
      return Widen<ElementType::kFp16>(row, head_dim, to);
    case ElementType::kFp32:
      return Widen<ElementType::kFp32>(row, head_dim, to);
  }
}

struct RotateScratch {
  alignas(64) float natural[kMaxHeadDim];
  alignas(64) float queries[kMaxPartRows * kMaxHeadDim];
  alignas(64) float weights[kMaxPartRows][kTileRows];
};

template <ElementType kType>
static void RotateRows(const RotateJob& job, RotateScratch& scratch) {
  const auto head_dim = static_cast<int>(job.head_dim);
  const std::size_t row_bytes = job.head_dim * kElementBytes<kType>;
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    WidenRow(job.row_type, job.rows[r], head_dim, scratch.natural);
    FloatEngine<kType>::OrderLikePairs(scratch.natural, head_dim,
                                       scratch.queries + r * job.head_dim);
  }
  for (std::uint32_t channel = 0; channel < job.channels; channel += kTileRows) {
    const std::uint32_t left = job.channels - channel;
    const std::uint32_t count = left < kTileRows ? left : kTileRows;
    const TileView tile = {.keys = job.rotation + channel * row_bytes,
                           .values = nullptr,
                           .row_bytes = row_bytes,
                           .head_dim = head_dim};
    ForEachRowGroup(job.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
      DotTile<kType, kRows>(tile, {0, static_cast<int>(count)}, {nullptr, nullptr},
                            scratch.queries + row * job.head_dim, scratch.weights + row);
    });
    for (std::uint32_t r = 0; r < job.row_count; ++r) {
      __builtin_memcpy(job.output + r * job.padded_channels + channel, scratch.weights[r],
                       count * sizeof(float));
    }
  }
}

// x . mean for each row x, in double.
TESSERA_SIMD void MultiplyMean(const RotateJob& job, RotateScratch& scratch) {
  const auto head_dim = static_cast<int>(job.head_dim);
  alignas(64) float mean[kMaxHeadDim];
  WidenRow(ElementType::kBf16, job.mean, head_dim, mean);
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    WidenRow(job.row_type, job.rows[r], head_dim, scratch.natural);
    double sum = 0;
    for (int d = 0; d < head_dim; ++d) sum += static_cast<double>(scratch.natural[d]) * mean[d];
    job.mean_products[r] = static_cast<float>(sum);
  }
}

static void RotateSimd(const RotateJob& job) {
  RotateScratch scratch;
  if (job.mean != nullptr) MultiplyMean(job, scratch);
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    float* output = job.output + r * job.padded_channels;
    for (std::uint32_t c = 0; c < job.padded_channels; c += Simd::kLanes) {
      Simd::Store(output + c, Simd::Zero());
    }
    if (job.rotation == nullptr) {
      WidenRow(job.row_type, job.rows[r], static_cast<int>(job.head_dim), output);
    }
  }
  if (job.rotation == nullptr) return;
  switch (job.rotation_type) {
    case ElementType::kBf16:
      return RotateRows<ElementType::kBf16>(job, scratch);
    case ElementType::kFp16:
      return RotateRows<ElementType::kFp16>(job, scratch);
    case ElementType::kFp32:
      return RotateRows<ElementType::kFp32>(job, scratch);
  }
}

template <ElementType kType>
static void UnrotateRows(const UnrotateJob& job) {
  const auto head_dim = static_cast<int>(job.head_dim);
  const std::size_t row_bytes = job.head_dim * kElementBytes<kType>;
  alignas(64) float weights[kMaxPartRows][kTileRows];
  for (std::uint32_t channel = 0; channel < job.channels; channel += kTileRows) {
    const std::uint32_t left = job.channels - channel;
    const std::uint32_t count = left < kTileRows ? left : kTileRows;
    for (std::uint32_t r = 0; r < job.row_count; ++r) {
      __builtin_memcpy(weights[r], job.rows + r * job.padded_channels + channel,
                       count * sizeof(float));
    }
    const TileView tile = {.keys = nullptr,
                           .values = job.rotation + channel * row_bytes,
                           .row_bytes = row_bytes,
                           .head_dim = head_dim};
    ForEachRowGroup(job.row_count, [&]<int kRows>(std::uint32_t row) TESSERA_INLINE_LAMBDA {
      AddValues<kType, kRows>(tile, {0, static_cast<int>(count)}, {nullptr, nullptr}, weights + row,
                              job.output + row * job.head_dim);
    });
  }
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    float* output = job.output + r * job.head_dim;
    for (int c = 0; c < head_dim; c += kPairChannels) {
      const auto pair = Simd::template InOrder<kType>(
          {Simd::Load(output + c), Simd::Load(output + c + Simd::kLanes)});
      Simd::Store(output + c, pair.a);
      Simd::Store(output + c + Simd::kLanes, pair.b);
    }
  }
}

// Adds the weighted mean to each row.
TESSERA_SIMD void AddMean(const UnrotateJob& job) {
  const auto head_dim = static_cast<int>(job.head_dim);
  alignas(64) float mean[kMaxHeadDim];
  WidenRow(ElementType::kBf16, job.mean, head_dim, mean);
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    float* output = job.output + r * job.head_dim;
    const auto weight = Simd::Splat(job.weights != nullptr ? job.weights[r] : 1.0f);
    for (int c = 0; c < head_dim; c += Simd::kLanes) {
      Simd::Store(output + c,
                  Simd::MultiplyAdd(weight, Simd::Load(mean + c), Simd::Load(output + c)));
    }
  }
}

static void UnrotateMatrix(const UnrotateJob& job) {
  if (job.rotation == nullptr) {
    for (std::uint32_t r = 0; r < job.row_count; ++r) {
      __builtin_memcpy(job.output + r * job.head_dim, job.rows + r * job.padded_channels,
                       job.head_dim * sizeof(float));
    }
    return;
  }
  for (std::uint32_t i = 0; i < job.row_count * job.head_dim; i += Simd::kLanes) {
    Simd::Store(job.output + i, Simd::Zero());
  }
  switch (job.rotation_type) {
    case ElementType::kBf16:
      return UnrotateRows<ElementType::kBf16>(job);
    case ElementType::kFp16:
      return UnrotateRows<ElementType::kFp16>(job);
    case ElementType::kFp32:
      return UnrotateRows<ElementType::kFp32>(job);
  }
}

static void UnrotateSimd(const UnrotateJob& job) {
  UnrotateMatrix(job);
  if (job.mean != nullptr) AddMean(job);
}

}  // namespace
}  // namespace tessera::kernels
