// Rotates the rows of one tile into shared memory as fp32: on tensor cores if rows and rotation are
// bf16 (their products are exact in fp32), by FMA otherwise, and by a plain copy without a
// rotation.
//
// Each function is block-collective, ends without a barrier, and returns whether this thread found
// an element that cannot be stored. Rows after the last one are never read.
//
// Rows of planes are centred first. What fp32 leaves of x - mu is split into two bf16, which carry
// 16 bits: so rows of every type take the tensor cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/encode/encode_row.cuh"

namespace tessera::kernels::cuda {

// K rows or V rows of one job, and their rotation.
struct RotateSource {
  const std::byte* rows;
  std::uint64_t stride;
  const std::byte* rotation;  // null: identity
  const std::byte* mean;      // bf16, subtracted from every row; null: none
  std::uint32_t row_count;
  std::uint32_t channels;
  ElementType type;
  ElementType rotation_type;
  std::uint32_t unstorable_bits;  // float bits of the smallest magnitude that is refused
};

TESSERA_DEVICE bool IsStorable(const RotateSource& source, float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffu) < source.unstorable_bits;
}

// Loads eight consecutive elements as floats. Requires 16-byte alignment.
TESSERA_DEVICE void LoadEight(ElementType type, const std::byte* at, float (&elements)[8]) {
  const gpu::Chunk first = *reinterpret_cast<const gpu::Chunk*>(at);
  if (type == ElementType::kFp32) {
    const gpu::Chunk second = reinterpret_cast<const gpu::Chunk*>(at)[1];
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) {
      elements[i] = std::bit_cast<float>(first.words[i]);
      elements[4 + i] = std::bit_cast<float>(second.words[i]);
    }
    return;
  }
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 8; ++i) {
    const auto bits = static_cast<std::uint16_t>(first.words[i / 2] >> (16 * (i % 2)));
    elements[i] = type == ElementType::kBf16 ? Bf16ToFloat(bits) : gpu::HalfToFloat(bits);
  }
}

// Checks every element, kept or not: dropping channels must not hide a NaN.
template <class Shape>
TESSERA_DEVICE bool CopyRows(const RotateSource& source, float* rotated) {
  constexpr std::uint32_t kPieces = Shape::kHeadDim / 8;
  bool bad = false;
  for (std::uint32_t i = gpu::Thread(); i < source.row_count * kPieces; i += Shape::kThreads) {
    const std::uint32_t row = i / kPieces;
    const std::uint32_t channel = i % kPieces * 8;
    float elements[8];
    LoadEight(source.type, source.rows + row * source.stride + channel * ElementBytes(source.type),
              elements);
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < 8; ++c) {
      bad |= !IsStorable(source, elements[c]);
      rotated[row * Shape::kRowFloats + channel + c] = elements[c];
    }
  }
  return bad;
}

// A thread computes one channel of four rows at a time, so that it uses each loaded piece of the
// rotation four times. The lanes of a warp read the same pieces of rows.
template <class Shape>
TESSERA_DEVICE bool RotateByFma(const RotateSource& source, float* rotated) {
  constexpr std::uint32_t kRows = 4;
  const std::uint32_t tasks = (source.row_count + kRows - 1) / kRows * Shape::kHeadDim;
  bool bad = false;
  for (std::uint32_t task = gpu::Thread(); task < tasks; task += Shape::kThreads) {
    const std::uint32_t channel = task % Shape::kHeadDim;
    const std::uint32_t first = task / Shape::kHeadDim * kRows;
    if (channel >= source.channels) continue;
    const std::byte* rotation = source.rotation + std::uint64_t{channel} * Shape::kHeadDim *
                                                      ElementBytes(source.rotation_type);
    float sums[kRows] = {};
    for (std::uint32_t d = 0; d < Shape::kHeadDim; d += 8) {
      float weights[8];
      LoadEight(source.rotation_type, rotation + d * ElementBytes(source.rotation_type), weights);
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < kRows; ++r) {
        const std::uint32_t row = first + r < source.row_count ? first + r : first;
        float elements[8];
        LoadEight(source.type, source.rows + row * source.stride + d * ElementBytes(source.type),
                  elements);
        TESSERA_UNROLL
        for (std::uint32_t i = 0; i < 8; ++i) {
          sums[r] = FusedMultiplyAdd(weights[i], elements[i], sums[r]);
        }
      }
    }
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kRows; ++r) {
      if (first + r >= source.row_count) continue;
      bad |= !IsStorable(source, sums[r]);
      rotated[(first + r) * Shape::kRowFloats + channel] = sums[r];
    }
  }
  return bad;
}

// Accumulators of one warp: 16 rows x 8 channels each.
template <class Shape>
struct RotateSums {
  float tiles[Shape::kColumnTiles][Shape::kRowTiles][4];
};

// rotated [row][channel] = X [row][dim] x R^T [dim][channel]. B operands are pairs of neighbours in
// a row of R, so R is read from global memory in its stored order, each element once per block.
// The rows are sums of kSplits operands.
template <class Shape, std::uint32_t kSplits = 1>
TESSERA_DEVICE void MultiplyRows(const RotateSource& source, const std::byte* shared,
                                 RotateSums<Shape>& sums) {
  constexpr std::uint32_t kTiles = kSplits * Shape::kRowTiles;
  const std::uint32_t first = gpu::Warp() * Shape::kWarpChannels;
  for (std::uint32_t s = 0; s < Shape::kSteps; ++s) {
    std::uint32_t rows[kTiles][4];
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kTiles; ++r) {
      const std::uint32_t chunk = s * 2 + KeyMatrixChunk(gpu::Lane());
      gpu::LoadMatrices(rows[r], shared + SwizzledOffset(r * 16 + KeyMatrixEntry(gpu::Lane()),
                                                         chunk, Shape::kSourceRowBytes));
    }
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      const std::uint32_t channel = first + t * kTileColumns + OperandBColumn(gpu::Lane());
      std::uint32_t weights[2];
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 2; ++i) {
        const std::uint32_t dim = s * 16 + OperandBRow(gpu::Lane(), i);
        weights[i] = channel < source.channels
                         ? reinterpret_cast<const std::uint32_t*>(
                               source.rotation)[(channel * Shape::kHeadDim + dim) / 2]
                         : 0;
      }
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < kTiles; ++r) {
        gpu::Mma<ElementType::kBf16>(sums.tiles[t][r % Shape::kRowTiles], rows[r], weights);
      }
    }
  }
}

template <class Shape>
TESSERA_DEVICE bool StoreSums(const RotateSource& source, const RotateSums<Shape>& sums,
                              float* rotated) {
  bool bad = false;
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < Shape::kRowTiles; ++r) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t row = r * 16 + AccumulatorRow(gpu::Lane(), i);
        const std::uint32_t channel = gpu::Warp() * Shape::kWarpChannels + t * kTileColumns +
                                      AccumulatorColumn(gpu::Lane(), i);
        bad |= row < source.row_count && channel < source.channels &&
               !IsStorable(source, sums.tiles[t][r][i]);
        rotated[row * Shape::kRowFloats + channel] = sums.tiles[t][r][i];
      }
    }
  }
  return bad;
}

template <class Shape>
TESSERA_DEVICE bool RotateByTensorCores(const RotateSource& source, float* rotated) {
  constexpr std::uint32_t kChunks = Shape::kSourceRowBytes / kChunkBytes;
  auto* shared = reinterpret_cast<std::byte*>(rotated);
  for (std::uint32_t i = gpu::Thread(); i < kTileEntries * kChunks; i += Shape::kThreads) {
    const std::uint32_t row = i / kChunks;
    const std::uint32_t chunk = i % kChunks;
    const bool live = row < source.row_count;
    // A source that is not read must still be a valid address.
    const std::byte* from =
        live ? source.rows + row * source.stride + chunk * kChunkBytes : source.rows;
    gpu::CopyChunk(shared + SwizzledOffset(row, chunk, Shape::kSourceRowBytes), from, live);
  }
  gpu::CommitCopies();
  gpu::WaitCopies<0>();
  gpu::SyncBlock();
  RotateSums<Shape> sums = {};
  MultiplyRows<Shape>(source, shared, sums);
  gpu::SyncBlock();  // all threads have read the rows that the sums overwrite
  return StoreSums<Shape>(source, sums, rotated);
}

// Stores the centred rows as two operands, one after the other: rounded to bf16, and what is left.
template <class Shape>
TESSERA_DEVICE void SplitRows(const RotateSource& source, std::byte* shared) {
  constexpr std::uint32_t kPieces = Shape::kHeadDim / 8;
  for (std::uint32_t i = gpu::Thread(); i < kTileEntries * kPieces; i += Shape::kThreads) {
    const std::uint32_t row = i / kPieces;
    const std::uint32_t piece = i % kPieces;
    gpu::Chunk front = {};
    gpu::Chunk rest = {};
    if (row < source.row_count) {
      float x[8];
      float mean[8];
      LoadEight(source.type,
                source.rows + row * source.stride + piece * 8 * ElementBytes(source.type), x);
      LoadEight(ElementType::kBf16, source.mean + piece * kChunkBytes, mean);
      TESSERA_UNROLL
      for (std::uint32_t w = 0; w < 4; ++w) {
        const float low = x[2 * w] - mean[2 * w];
        const float high = x[2 * w + 1] - mean[2 * w + 1];
        const std::uint32_t pair = gpu::PackPair<ElementType::kBf16>(low, high);
        front.words[w] = pair;
        rest.words[w] =
            gpu::PackPair<ElementType::kBf16>(low - std::bit_cast<float>(pair << 16),
                                              high - std::bit_cast<float>(pair & 0xffff0000u));
      }
    }
    std::byte* place = shared + SwizzledOffset(row, piece, Shape::kSourceRowBytes);
    *reinterpret_cast<gpu::Chunk*>(place) = front;
    *reinterpret_cast<gpu::Chunk*>(place + kTileEntries * Shape::kSourceRowBytes) = rest;
  }
}

template <class Shape>
TESSERA_DEVICE bool RotateCentred(const RotateSource& source, float* rotated) {
  auto* shared = reinterpret_cast<std::byte*>(rotated);
  SplitRows<Shape>(source, shared);
  gpu::SyncBlock();
  RotateSums<Shape> sums = {};
  MultiplyRows<Shape, 2>(source, shared, sums);
  gpu::SyncBlock();  // all threads have read the rows that the sums overwrite
  return StoreSums<Shape>(source, sums, rotated);
}

template <class Shape>
TESSERA_DEVICE bool RotateRows(const RotateSource& source, float* rotated) {
  if (source.mean != nullptr) return RotateCentred<Shape>(source, rotated);
  if (source.rotation == nullptr) return CopyRows<Shape>(source, rotated);
  if (source.type == ElementType::kBf16 && source.rotation_type == ElementType::kBf16) {
    return RotateByTensorCores<Shape>(source, rotated);
  }
  return RotateByFma<Shape>(source, rotated);
}

}  // namespace tessera::kernels::cuda
