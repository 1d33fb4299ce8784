// Query rows on their way into the space of a packed segment: q' = R_k q, once per (query row,
// segment), in fp32, then as operands of the tensor cores.
//
//   grid x  the layer's strategies        grid y  8 columns each (query x head of the group)
//
// A row is divided by a power of two so that its largest element is in [1, 2), whose logarithm goes
// beside it: fp16 then neither overflows nor loses small elements, and bf16 is as exact either way.
#pragma once

#include <cstdint>

#include "kernels/cuda/fragment.h"
#include "kernels/cuda/gpu.cuh"
#include "kernels/cuda/lane_index.h"
#include "kernels/cuda/packed_index.h"
#include "kernels/cuda/params.h"
#include "kernels/cuda/work.cuh"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kRotateThreads = 128;

// Shared memory: 8 query rows, then 8 rotated ones, of head_dim floats.
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

// The rotation at a pool offset, or null where it does not lie in the pool.
TESSERA_DEVICE const std::byte* FindRotation(const DeviceArena& arena, const StepStrategy& strategy,
                                             const RowShape& side, std::uint64_t offset) {
  return reinterpret_cast<const std::byte*>(ResolveObject(
      arena, offset, RotationBytes(strategy.shape, side, strategy.rotation_type), kTileAlignment));
}

// What a strategy multiplies with. False, where a matrix that it names is not in the pool: then
// nothing may be read. Null matrices are the identity.
struct Rotations {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;

  TESSERA_DEVICE bool Find(const DeviceArena& arena, const StepStrategy& strategy) {
    if (strategy.key_rotation != kNoRotation) {
      key = FindRotation(arena, strategy, strategy.shape.key, strategy.key_rotation);
      if (key == nullptr) return false;
    }
    if (strategy.value_rotation != kNoRotation) {
      value = FindRotation(arena, strategy, strategy.shape.value, strategy.value_rotation);
      if (value == nullptr) return false;
    }
    return true;
  }
};

// The 8 columns from `first_column` on as fp32 in shared memory, zeros beyond the last.
TESSERA_DEVICE void GatherQueries(const AttendParams& params, const StepSequence& sequence,
                                  std::uint32_t kv_head, std::uint32_t first_column,
                                  float* queries) {
  const auto bytes = static_cast<std::uint32_t>(ElementBytes(params.query_type));
  for (std::uint32_t i = gpu::Thread(); i < kTileColumns * params.head_dim; i += gpu::Threads()) {
    const std::uint32_t column = first_column + i / params.head_dim;
    queries[i] = column < sequence.queries * params.group
                     ? LoadElement(QueryRowOf(params, sequence, kv_head, column, bytes),
                                   i % params.head_dim, params.query_type)
                     : 0;
  }
}

// products[column] += element x query[column], for dimension `dim` of the columns' rows.
TESSERA_DEVICE void MultiplyElement(float element, const float* queries, std::uint32_t head_dim,
                                    std::uint32_t dim, float (&products)[kTileColumns]) {
  TESSERA_UNROLL
  for (std::uint32_t c = 0; c < kTileColumns; ++c) {
    products[c] += element * queries[c * head_dim + dim];
  }
}

// products[column] += R[channel] x query[column], `row` being R's row of the channel.
TESSERA_DEVICE void MultiplyRow(const std::byte* row, ElementType type, std::uint32_t head_dim,
                                const float* queries, float (&products)[kTileColumns]) {
  const std::uint32_t per_word = type == ElementType::kFp32 ? 1 : 2;
  const auto* chunks = reinterpret_cast<const gpu::Chunk*>(row);
  std::uint32_t dim = 0;
  for (std::uint32_t i = 0; dim < head_dim; ++i) {
    const gpu::Chunk chunk = chunks[i];
    TESSERA_UNROLL
    for (std::uint32_t w = 0; w < 4; ++w) {
      const std::uint32_t word = chunk.words[w];
      if (per_word == 1) {
        MultiplyElement(std::bit_cast<float>(word), queries, head_dim, dim, products);
      } else {
        MultiplyElement(HalfElement(static_cast<std::uint16_t>(word), type), queries, head_dim, dim,
                        products);
        MultiplyElement(HalfElement(static_cast<std::uint16_t>(word >> 16), type), queries,
                        head_dim, dim + 1, products);
      }
      dim += per_word;
    }
  }
}

TESSERA_DEVICE void RotateColumns(const AttendParams& params, const StepStrategy& strategy,
                                  const std::byte* rotation, const float* queries, float* rotated) {
  for (std::uint32_t channel = gpu::Thread(); channel < params.head_dim;
       channel += gpu::Threads()) {
    float products[kTileColumns] = {};
    if (channel < strategy.shape.key.channels && rotation != nullptr) {
      const std::uint64_t row_bytes = params.head_dim * ElementBytes(strategy.rotation_type);
      MultiplyRow(rotation + channel * row_bytes, strategy.rotation_type, params.head_dim, queries,
                  products);
    }
    TESSERA_UNROLL
    for (std::uint32_t c = 0; c < kTileColumns; ++c) {
      const std::uint32_t at = c * params.head_dim + channel;
      rotated[at] = rotation == nullptr ? queries[at] : products[c];
    }
  }
}

// The power of two that a row whose largest magnitude is `peak` is divided by; 1 for rows of zeros
// and for those that hold what is no number.
TESSERA_HOST_DEVICE inline float ScaleOfRow(float peak) {
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(peak) & 0x7f800000u;
  if (exponent == 0 || exponent == 0x7f800000u) return 1;
  return std::bit_cast<float>(exponent);
}

// Rounds the rotated rows and stores them, a warp per column.
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

// The kernel's body.
TESSERA_DEVICE void RotateQueries(const AttendParams& params) {
  const StepReader step(params.step);
  if (!Serves(params, step) || gpu::BlockX() >= step.layer(params.layer).strategies) return;
  const StepStrategy& strategy = step.strategy(params.layer, gpu::BlockX());
  if (!strategy.shape.packed() || strategy.shape.head_dim != params.head_dim) return;
  Rotations rotations;
  const std::uint32_t kv_heads = step.layer(params.layer).kv_heads;
  if (!rotations.Find(step.arena(), strategy)) {
    if (gpu::Thread() == 0) {
      gpu::AtomicMin(params.fault,
                     FaultWord::Pack(FaultKind::kBadTile, params.layer, strategy.lane));
    }
    return;
  }
  const StepSequence& sequence = step.sequence(strategy.lane / kv_heads);
  const std::uint32_t columns = sequence.queries * params.group;
  const std::uint32_t first_column = gpu::BlockY() * kTileColumns;
  if (first_column >= columns) return;
  auto* queries = reinterpret_cast<float*>(gpu::SharedMemory());
  float* rotated = queries + kTileColumns * params.head_dim;
  GatherQueries(params, sequence, strategy.lane % kv_heads, first_column, queries);
  gpu::SyncBlock();
  RotateColumns(params, strategy, rotations.key, queries, rotated);
  gpu::SyncBlock();
  StoreRotated(params, OperandType(ValuesOf(strategy.shape.format)), gpu::BlockX(), first_column,
               columns < params.max_columns ? columns : params.max_columns, rotated);
}

}  // namespace tessera::kernels::cuda
