#include <cuda_runtime.h>

#include <algorithm>
#include <span>

#include "kernels/cuda/attend/launch_attend.h"
#include "kernels/cuda/attend/merge.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/rotate.cuh"
#include "kernels/cuda/common/tuning.h"
#include "kernels/cuda/encode/rows.cuh"
#include "kernels/cuda/select/launch_selection.h"

namespace tessera::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kRotateThreads)
    RotateKernel(const __grid_constant__ AttendParams params) {
  RotateQueries(params);
}
__global__ void MergeKernel(const __grid_constant__ AttendParams params) { Merge(params); }
__global__ void AppendKernel(const __grid_constant__ AppendParams params) { AppendRow(params); }
__global__ void StoreRowsKernel(const __grid_constant__ StoreRowsParams params) {
  StoreRun(params);
}
__global__ void StoreWordsKernel(const __grid_constant__ StoreWordsParams params) {
  StoreWord(params);
}

constexpr std::uint32_t kRowThreads = 64;   // a K row and a V row of 512 bytes at once
constexpr std::uint32_t kRunThreads = 256;  // 16 rows of K and V at once, for 128 bf16 elements
constexpr std::uint32_t kWordThreads = 128;

// Each inner span holds the variants of one kind, element type and head_dim.
std::span<const std::span<const AttendVariant>> EveryVariant() {
  static const std::span<const AttendVariant> all[] = {
      kAttendBf16Dim64,       kAttendBf16Dim128,       kAttendBf16Dim256,
      kAttendFp16Dim64,       kAttendFp16Dim128,       kAttendFp16Dim256,
      kAttendFp32Dim64,       kAttendFp32Dim128,       kAttendFp32Dim256,
      kAttendBf16Dim64Words,  kAttendBf16Dim128Words,  kAttendBf16Dim256Words,
      kAttendFp16Dim64Words,  kAttendFp16Dim128Words,  kAttendFp16Dim256Words,
      kAttendFp32Dim64Words,  kAttendFp32Dim128Words,  kAttendFp32Dim256Words,
      kAttendPackedBf16Dim64, kAttendPackedBf16Dim128, kAttendPackedBf16Dim256,
      kAttendPackedFp16Dim64, kAttendPackedFp16Dim128, kAttendPackedFp16Dim256,
      kAttendPackedInt8Dim64, kAttendPackedInt8Dim128, kAttendPackedInt8Dim256,
      kAttendPackedFp8Dim64,  kAttendPackedFp8Dim128,  kAttendPackedFp8Dim256,
      kAttendPlanesDim64,     kAttendPlanesDim128,     kAttendPlanesDim256,
      kAttendNearPlanesDim64, kAttendNearPlanesDim128, kAttendNearPlanesDim256};
  return all;
}

// The same for parts of selected blocks.
std::span<const std::span<const AttendVariant>> EverySelectedVariant() {
  static const std::span<const AttendVariant> all[] = {
      kAttendBf16Dim64Selected,        kAttendBf16Dim128Selected,
      kAttendBf16Dim256Selected,       kAttendFp16Dim64Selected,
      kAttendFp16Dim128Selected,       kAttendFp16Dim256Selected,
      kAttendFp32Dim64Selected,        kAttendFp32Dim128Selected,
      kAttendFp32Dim256Selected,       kAttendPackedBf16Dim64Selected,
      kAttendPackedBf16Dim128Selected, kAttendPackedBf16Dim256Selected,
      kAttendPackedFp16Dim64Selected,  kAttendPackedFp16Dim128Selected,
      kAttendPackedFp16Dim256Selected, kAttendPackedInt8Dim64Selected,
      kAttendPackedInt8Dim128Selected, kAttendPackedInt8Dim256Selected,
      kAttendPackedFp8Dim64Selected,   kAttendPackedFp8Dim128Selected,
      kAttendPackedFp8Dim256Selected,  kAttendPlanesDim64Selected,
      kAttendPlanesDim128Selected,     kAttendPlanesDim256Selected,
      kAttendNearPlanesDim64Selected,  kAttendNearPlanesDim128Selected,
      kAttendNearPlanesDim256Selected};
  return all;
}

using VariantTable = std::span<const std::span<const AttendVariant>>;

// Kernels over packed tiles and planes serve layers of every type.
std::span<const AttendVariant> Variants(VariantTable table, PartKind kind, ElementType type,
                                        std::uint32_t head_dim) {
  const bool dense = kind == PartKind::kDense || kind == PartKind::kDenseWords;
  for (std::span<const AttendVariant> variants : table) {
    const AttendVariant& first = variants[0];
    if (first.kind == kind && first.head_dim == head_dim && (!dense || first.type == type)) {
      return variants;
    }
  }
  return {};
}

cudaError_t PrepareVariants(std::span<const AttendVariant> variants, std::uint32_t shared_bytes) {
  for (const AttendVariant& variant : variants) {
    if (variant.shared_bytes > shared_bytes) continue;  // LaunchAttend refuses these
    if (const cudaError_t error = variant.prepare(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The narrowest kernel that takes all query rows at once, or else the widest.
const AttendVariant& Narrowest(std::span<const AttendVariant> variants, std::uint32_t columns) {
  for (const AttendVariant& variant : variants) {
    if (variant.columns >= columns) return variant;
  }
  return variants.back();
}

const AttendVariant& VariantOf(VariantTable table, PartKind kind, const AttendParams& params) {
  return Narrowest(Variants(table, kind, params.query_type, params.head_dim), params.max_columns);
}

// Returns true if the device has the shared memory that the kinds' kernels need.
bool Fits(const DeviceLimits& device, VariantTable table, std::uint32_t kinds,
          const AttendParams& params) {
  for (std::uint32_t k = 0; k < kPartKinds; ++k) {
    const auto kind = static_cast<PartKind>(k);
    if ((kinds & KindBit(kind)) == 0) continue;
    if (VariantOf(table, kind, params).shared_bytes > device.shared_bytes_per_block) return false;
  }
  return true;
}

// Launches one kernel per kind, for up to `works` work items.
cudaError_t LaunchKinds(const DeviceLimits& device, VariantTable table, std::uint32_t kinds,
                        std::uint32_t works, const AttendParams& params, cudaStream_t stream) {
  const std::uint32_t blocks =
      std::clamp<std::uint32_t>(works, 1, device.multiprocessors * kBlocksPerMultiprocessor);
  for (std::uint32_t k = 0; k < kPartKinds; ++k) {
    const auto kind = static_cast<PartKind>(k);
    if ((kinds & KindBit(kind)) == 0) continue;
    const cudaError_t error = VariantOf(table, kind, params).launch(params, blocks, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchRotate(const AttendParams& params, cudaStream_t stream) {
  if (params.max_strategies == 0) return cudaSuccess;
  const dim3 blocks(params.max_strategies, (params.max_columns + kTileColumns - 1) / kTileColumns);
  RotateKernel<<<blocks, kRotateThreads, RotateSharedBytes(params.head_dim), stream>>>(params);
  return cudaGetLastError();
}

// Launches the rotation of queries and, if a sequence selects, the selection.
cudaError_t LaunchChoice(const DeviceLimits& device, const AttendParams& params,
                         cudaStream_t stream) {
  if (const cudaError_t error = LaunchRotate(params, stream); error != cudaSuccess) return error;
  if (params.max_selections == 0) return cudaSuccess;
  return LaunchSelection(device, params, stream);
}

}  // namespace

cudaError_t PrepareDevice(int device, DeviceLimits* limits) {
  int multiprocessors = 0;
  int shared_bytes = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  *limits = {.multiprocessors = static_cast<std::uint32_t>(multiprocessors),
             .shared_bytes_per_block = static_cast<std::uint32_t>(shared_bytes)};
  for (const VariantTable table : {EveryVariant(), EverySelectedVariant()}) {
    for (std::span<const AttendVariant> variants : table) {
      error = PrepareVariants(variants, limits->shared_bytes_per_block);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchAttend(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream) {
  if (!AttendCallProblem(call).empty()) return cudaErrorInvalidValue;
  const AttendParams params = MakeAttendParams(call);
  if (!Fits(device, EveryVariant(), params.kinds, params) ||
      !Fits(device, EverySelectedVariant(), params.selected_kinds, params)) {
    return cudaErrorInvalidConfiguration;
  }
  if (call.limits.batch == 0) return cudaSuccess;
  cudaError_t error = LaunchChoice(device, params, stream);
  if (error != cudaSuccess) return error;
  error = LaunchKinds(device, EveryVariant(), params.kinds, call.limits.works, params, stream);
  if (error != cudaSuccess) return error;
  error = LaunchKinds(device, EverySelectedVariant(), params.selected_kinds, call.limits.slots,
                      params, stream);
  if (error != cudaSuccess) return error;
  const dim3 rows(params.query_heads, call.limits.queries, call.limits.batch);
  MergeKernel<<<rows, MergeThreads(params.head_dim), MergeSharedBytes(params.head_dim), stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t LaunchSelect(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream) {
  if (!SelectCallProblem(call).empty()) return cudaErrorInvalidValue;
  if (call.limits.batch == 0) return cudaSuccess;
  return LaunchChoice(device, MakeAttendParams(call), stream);
}

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream) {
  if (!RowsProblem(params.key, params.value, params.row_stride, params.row_bytes).empty() ||
      params.step == nullptr || params.fault == nullptr || params.max_batch > 65535) {
    return cudaErrorInvalidValue;
  }
  if (params.max_batch == 0 || params.max_appended == 0) return cudaSuccess;
  const dim3 rows(params.max_appended * params.kv_heads, params.max_batch);
  AppendKernel<<<rows, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchStoreRows(const StoreRowsParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.runs == nullptr || params.found == nullptr) return cudaErrorInvalidValue;
  StoreRowsKernel<<<params.count, kRunThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchStoreWords(const StoreWordsParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.stores == nullptr) return cudaErrorInvalidValue;
  const std::uint32_t blocks = (params.count + kWordThreads - 1) / kWordThreads;
  StoreWordsKernel<<<blocks, kWordThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
