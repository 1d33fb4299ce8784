// Rotates query rows into the space of each packed segment: q' = R_k q. Each (query row, segment)
// is rotated once, in fp32, and then stored as a tensor-core operand.
//
//   grid x  the layer's strategies        grid y  8 columns each (query x head of the group)
//
// A row is divided by a power of two so that its largest element is in [1, 2); the power's
// logarithm is stored next to it. So fp16 neither overflows nor loses small elements. bf16 is
// equally precise with or without it.
//
// Over planes a row becomes int8 codes (planes_index.h), with q . mu_k beside them; so it does for
// signs beside dense rows, which its first half scores.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/lane_sums.cuh"
#include "kernels/cuda/common/packed_index.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/common/sign_index.h"
#include "kernels/cuda/common/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kRotateThreads = 256;
// Rows of a matrix that 8 lanes multiply at once.
inline constexpr std::uint32_t kRotateRows = 4;

// Shared memory: 8 query rows, then 8 rotated rows, of head_dim floats each.
TESSERA_HOST_DEVICE constexpr std::uint32_t RotateSharedBytes(std::uint32_t head_dim) {
  return 2 * kTileColumns * head_dim * static_cast<std::uint32_t>(sizeof(float));
}

TESSERA_DEVICE float HalfElement(std::uint16_t half, ElementType type) {
  return type == ElementType::kBf16 ? std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16)
                                    : gpu::HalfToFloat(half);
}
TESSERA_DEVICE float LoadElement(const std::byte* row, std::uint32_t index, ElementType type) {
  if (type == ElementType::kFp32) return reinterpret_cast<const float*>(row)[index];
  return HalfElement(reinterpret_cast<const std::uint16_t*>(row)[index], type);
}

// Returns the rotation at a pool offset, or null if it does not lie in the pool.
TESSERA_DEVICE const std::byte* FindRotation(const DeviceArena& arena, const StepStrategy& strategy,
                                             const RowShape& side, std::uint64_t offset) {
  return reinterpret_cast<const std::byte*>(ResolveObject(
      arena, offset, RotationBytes(strategy.shape, side, strategy.rotation_type), kTileAlignment));
}

// Bytes of a mean, in bf16.
TESSERA_HOST_DEVICE constexpr std::uint64_t MeanBytes(const TileShape& shape) {
  return std::uint64_t{shape.head_dim} * ElementBytes(ElementType::kBf16);
}

// The rotation matrices and means of a strategy; null means identity, or zeros. Find returns false
// if one lies outside the pool; nothing may be read then.
struct Rotations {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  const std::byte* key_mean = nullptr;
  const std::byte* value_mean = nullptr;

  TESSERA_DEVICE bool Find(const DeviceArena& arena, const StepStrategy& strategy) {
    if (strategy.key_rotation != kNoRotation) {
      key = FindRotation(arena, strategy, strategy.shape.key, strategy.key_rotation);
      if (key == nullptr) return false;
    }
    if (strategy.value_rotation != kNoRotation) {
      value = FindRotation(arena, strategy, strategy.shape.value, strategy.value_rotation);
      if (value == nullptr) return false;
    }
    return FindMean(arena, strategy, strategy.key_mean, key_mean) &&
           FindMean(arena, strategy, strategy.value_mean, value_mean);
  }

 private:
  TESSERA_DEVICE static bool FindMean(const DeviceArena& arena, const StepStrategy& strategy,
                                      std::uint64_t offset, const std::byte*& mean) {
    if (offset == kNoRotation) return true;
    mean = reinterpret_cast<const std::byte*>(
        ResolveObject(arena, offset, MeanBytes(strategy.shape), kTileAlignment));
    return mean != nullptr;
  }
};

// Loads the 8 columns from `first_column` on into shared memory as fp32, [dimension][column].
// Columns after the last one are zeros.
TESSERA_DEVICE void GatherQueries(const AttendParams& params, const StepSequence& sequence,
                                  std::uint32_t kv_head, std::uint32_t first_column,
                                  float* queries) {
  const auto bytes = static_cast<std::uint32_t>(ElementBytes(params.query_type));
  for (std::uint32_t i = gpu::Thread(); i < kTileColumns * params.head_dim; i += gpu::Threads()) {
    const std::uint32_t column = i / params.head_dim;
    const std::uint32_t dim = i % params.head_dim;
    const bool live = first_column + column < sequence.queries * params.group;
    queries[dim * kTileColumns + column] =
        live ? LoadElement(QueryRowOf(params, sequence, kv_head, first_column + column, bytes), dim,
                           params.query_type)
             : 0;
  }
}

// products[row][column] += element x query[column], for one dimension of the columns' rows.
TESSERA_DEVICE void MultiplyElements(const float (&elements)[kRotateRows], const float* query,
                                     float (&products)[kRotateRows][kTileColumns]) {
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < kTileColumns; ++c) {
    const float q = query[c];
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kRotateRows; ++r) products[r][c] += elements[r] * q;
  }
}

// Like MultiplyElements, for the dimensions of one chunk of each row of R.
TESSERA_DEVICE void MultiplyChunks(const gpu::Chunk (&chunks)[kRotateRows], ElementType type,
                                   const float* queries,
                                   float (&products)[kRotateRows][kTileColumns]) {
  TESSERA_UNROLL
  for (std::uint32_t w = 0; w < 4; ++w) {
    float elements[kRotateRows];
    if (type == ElementType::kFp32) {
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < kRotateRows; ++r) {
        elements[r] = std::bit_cast<float>(chunks[r].words[w]);
      }
      MultiplyElements(elements, queries + w * kTileColumns, products);
      continue;
    }
    TESSERA_UNROLL
    for (std::uint32_t half = 0; half < 2; ++half) {
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < kRotateRows; ++r) {
        elements[r] =
            HalfElement(static_cast<std::uint16_t>(chunks[r].words[w] >> (16 * half)), type);
      }
      MultiplyElements(elements, queries + (2 * w + half) * kTileColumns, products);
    }
  }
}

// Computes the rotated columns. Eight lanes share a row of R, chunk by chunk, and each lane has
// kRotateRows rows in flight, because the matrix is read once and from far memory. The 8 columns of
// a row end up in the 8 lanes.
TESSERA_DEVICE void RotateColumns(const AttendParams& params, const StepStrategy& strategy,
                                  const std::byte* rotation, const float* queries, float* rotated) {
  const std::uint32_t channels = strategy.shape.key.channels;
  const auto row_bytes =
      static_cast<std::uint32_t>(params.head_dim * ElementBytes(strategy.rotation_type));
  const std::uint32_t chunk_dims =
      kChunkBytes / static_cast<std::uint32_t>(ElementBytes(strategy.rotation_type));
  const std::uint32_t own = gpu::Lane() % kTileColumns;
  const std::uint32_t teams = gpu::Threads() / kTileColumns;
  // All lanes of a warp run the same number of rounds, because they exchange their sums.
  for (std::uint32_t round = 0; round < params.head_dim; round += teams * kRotateRows) {
    const std::uint32_t first = round + gpu::Thread() / kTileColumns;
    float products[kRotateRows][kTileColumns] = {};
    for (std::uint32_t at = own * kChunkBytes; at < row_bytes; at += kTileColumns * kChunkBytes) {
      gpu::Chunk chunks[kRotateRows];
      TESSERA_UNROLL
      for (std::uint32_t r = 0; r < kRotateRows; ++r) {
        const std::uint32_t channel = first + r * teams;
        chunks[r] = channel < channels ? *reinterpret_cast<const gpu::Chunk*>(
                                             rotation + std::uint64_t{channel} * row_bytes + at)
                                       : gpu::Chunk{};
      }
      MultiplyChunks(chunks, strategy.rotation_type,
                     queries + at / kChunkBytes * chunk_dims * kTileColumns, products);
    }
    TESSERA_UNROLL
    for (std::uint32_t r = 0; r < kRotateRows; ++r) {
      const std::uint32_t channel = first + r * teams;
      const float product = SumAcrossLanes(products[r]);
      if (channel < params.head_dim) rotated[own * params.head_dim + channel] = product;
    }
  }
}

// Copies rows unchanged if there is no matrix.
TESSERA_DEVICE void CopyColumns(const AttendParams& params, const float* queries, float* rotated) {
  for (std::uint32_t i = gpu::Thread(); i < kTileColumns * params.head_dim; i += gpu::Threads()) {
    rotated[i % kTileColumns * params.head_dim + i / kTileColumns] = queries[i];
  }
}

// Returns the power of two that divides a row whose largest magnitude is `peak`. Returns 1 for rows
// of zeros and rows with NaN or infinity.
TESSERA_HOST_DEVICE inline float ScaleOfRow(float peak) {
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(peak) & 0x7f800000u;
  if (exponent == 0 || exponent == 0x7f800000u) return 1;
  return std::bit_cast<float>(exponent);
}

// Rounds and stores the rotated rows, one warp per column.
TESSERA_DEVICE void StoreRotated(const AttendParams& params, ElementType type,
                                 std::uint32_t strategy, std::uint32_t first_column,
                                 std::uint32_t columns, const float* rotated) {
  for (std::uint32_t c = gpu::Warp(); c < kTileColumns; c += gpu::Threads() / kWarp) {
    const float* row = rotated + c * params.head_dim;
    float peak = 0;
    for (std::uint32_t i = gpu::Lane(); i < params.head_dim; i += kWarp) {
      peak = gpu::Max(peak, row[i] < 0 ? -row[i] : row[i]);
    }
    TESSERA_UNROLL
    for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
      peak = gpu::Max(peak, gpu::ShuffleXor(peak, mask));
    }
    if (first_column + c >= columns) continue;
    const float scale = ScaleOfRow(peak);
    const std::uint64_t slot = std::uint64_t{strategy} * params.max_columns + first_column + c;
    if (gpu::Lane() == 0) params.rotated_scales[slot] = scale;
    auto* target = reinterpret_cast<std::uint32_t*>(params.rotated + slot * params.head_dim);
    for (std::uint32_t i = gpu::Lane(); i < params.head_dim / 2; i += kWarp) {
      const float low = row[2 * i] / scale;
      const float high = row[2 * i + 1] / scale;
      target[i] = type == ElementType::kBf16 ? gpu::PackPair<ElementType::kBf16>(low, high)
                                             : gpu::PackPair<ElementType::kFp16>(low, high);
    }
  }
}

// Sums over a warp; every lane gets the same bits.
TESSERA_DEVICE float SumOfWarp(float value) {
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) value += gpu::ShuffleXor(value, mask);
  return value;
}

struct CodedHalf {
  float scale;
  float sum;
  float squares;  // sum of the codes' squares
};

// Rounds channels [first, first + head_dim / 2) of a row to codes. The scale is that of the plane:
// channels [plane_begin, plane_end). Warp-collective.
TESSERA_DEVICE CodedHalf CodeHalf(const float* row, std::uint32_t first, std::uint32_t count,
                                  std::uint32_t plane_begin, std::uint32_t plane_end, bool store,
                                  std::int8_t* codes) {
  float peak = 0;
  bool finite = true;
  for (std::uint32_t i = plane_begin + gpu::Lane(); i < plane_end; i += kWarp) {
    const float magnitude = row[i] < 0 ? -row[i] : row[i];
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    peak = gpu::Max(peak, magnitude);
  }
  TESSERA_UNROLL
  for (std::uint32_t mask = 1; mask < kWarp; mask *= 2) {
    peak = gpu::Max(peak, gpu::ShuffleXor(peak, mask));
  }
  finite = gpu::Ballot(!finite) == 0;
  const float scale = peak != 0 ? peak / 127 : 1;
  float sum = 0;
  float squares = 0;
  for (std::uint32_t i = first + gpu::Lane(); i < first + count; i += kWarp) {
    // Adding 1.5 x 2^23 rounds to a whole number, ties to even.
    constexpr float kWhole = 12582912.0f;
    const float code = finite ? (row[i] / scale + kWhole) - kWhole : 0;
    if (store) codes[i] = static_cast<std::int8_t>(code);
    sum += code;
    squares += code * code;
  }
  // The sums of whole numbers are exact.
  return {.scale = finite ? scale : std::numeric_limits<float>::quiet_NaN(),
          .sum = SumOfWarp(sum),
          .squares = SumOfWarp(squares)};
}

// Stores the rotated rows as codes, one warp per column. A null mean is zeros.
TESSERA_DEVICE void StoreCodes(const AttendParams& params, const TileShape& shape,
                               const std::byte* mean, std::uint32_t strategy,
                               std::uint32_t first_column, std::uint32_t columns,
                               const float* queries, const float* rotated) {
  const std::uint32_t half = params.head_dim / kHalves;
  const bool two = shape.key_planes.second != 0 || HasSigns(shape);
  for (std::uint32_t c = gpu::Warp(); c < kTileColumns; c += gpu::Threads() / kWarp) {
    const bool store = first_column + c < columns;
    const float* row = rotated + c * params.head_dim;
    const std::uint64_t slot = std::uint64_t{strategy} * params.max_columns + first_column + c;
    auto* codes = reinterpret_cast<std::int8_t*>(params.rotated + slot * params.head_dim);
    CodedQuery coded = {};
    TESSERA_UNROLL
    for (std::uint32_t h = 0; h < kHalves; ++h) {
      const CodedHalf of_half = CodeHalf(row, h * half, half, two ? h * half : 0,
                                         two ? (h + 1) * half : params.head_dim, store, codes);
      coded.scale[h] = of_half.scale;
      coded.sum[h] = of_half.sum;
      if (h == 0) coded.inverse_length = of_half.squares > 0 ? 1 / ::sqrtf(of_half.squares) : 1;
    }
    float product = 0;
    for (std::uint32_t i = gpu::Lane(); mean != nullptr && i < params.head_dim; i += kWarp) {
      product += queries[i * kTileColumns + c] * LoadElement(mean, i, ElementType::kBf16);
    }
    coded.mean_product = SumOfWarp(product);
    if (store && gpu::Lane() == 0) {
      *reinterpret_cast<CodedQuery*>(codes + params.head_dim) = coded;
    }
  }
}

// Kernel body.
TESSERA_DEVICE void RotateQueries(const AttendParams& params) {
  const StepReader step(params.step);
  if (!Serves(params, step) || gpu::BlockX() >= step.layer(params.layer).strategies) return;
  const StepStrategy& strategy = step.strategy(params.layer, gpu::BlockX());
  const std::uint32_t kv_heads = step.layer(params.layer).kv_heads;
  const StepSequence& sequence = step.sequence(strategy.lane / kv_heads);
  // Dense rows need no rotated queries, unless their signs are scored.
  const bool scored = HasSigns(strategy.shape) && sequence.rule.selects != 0;
  if (!(strategy.shape.packed() || scored)) return;
  if (strategy.shape.head_dim != params.head_dim) return;
  Rotations rotations;
  if (!rotations.Find(step.arena(), strategy)) {
    if (gpu::Thread() == 0) {
      gpu::AtomicMin(params.fault,
                     FaultWord::Pack(FaultKind::kBadTile, params.layer, strategy.lane));
    }
    return;
  }
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t first_column = gpu::BlockY() * kTileColumns;
  if (first_column >= columns) return;
  auto* queries = reinterpret_cast<float*>(gpu::SharedMemory());
  float* rotated = queries + kTileColumns * params.head_dim;
  GatherQueries(params, sequence, strategy.lane % kv_heads, first_column, queries);
  gpu::SyncBlock();
  if (rotations.key == nullptr) {
    CopyColumns(params, queries, rotated);
  } else {
    RotateColumns(params, strategy, rotations.key, queries, rotated);
  }
  gpu::SyncBlock();
  const std::uint32_t limit = columns < params.max_columns ? columns : params.max_columns;
  if (strategy.shape.planes() || HasSigns(strategy.shape)) {
    StoreCodes(params, strategy.shape, rotations.key_mean, gpu::BlockX(), first_column, limit,
               queries, rotated);
  } else {
    StoreRotated(params, OperandType(ValuesOf(strategy.shape.format)), gpu::BlockX(), first_column,
                 limit, rotated);
  }
}

}  // namespace tessera::kernels::cuda
