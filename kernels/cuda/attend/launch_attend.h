// Table of the attention kernels: one array per kind of part, element type and head_dim. Each is in
// its own file, so that nvcc compiles them in parallel. Used by launch.cu only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/common/params.h"

namespace tessera::kernels::cuda {

struct AttendVariant {
  PartKind kind;
  ElementType type;  // for dense kinds: the layer's type
  std::uint32_t head_dim;
  std::uint32_t columns;  // query rows per block of threads
  std::uint32_t shared_bytes;
  cudaError_t (*prepare)();
  cudaError_t (*launch)(const AttendParams& params, std::uint32_t blocks_x, cudaStream_t stream);
};

// Ordered by number of columns, smallest first.
extern const AttendVariant kAttendBf16Dim64[2];
extern const AttendVariant kAttendBf16Dim128[2];
extern const AttendVariant kAttendBf16Dim256[2];
extern const AttendVariant kAttendFp16Dim64[2];
extern const AttendVariant kAttendFp16Dim128[2];
extern const AttendVariant kAttendFp16Dim256[2];
extern const AttendVariant kAttendFp32Dim64[1];
extern const AttendVariant kAttendFp32Dim128[1];
extern const AttendVariant kAttendFp32Dim256[1];
extern const AttendVariant kAttendBf16Dim64Words[2];
extern const AttendVariant kAttendBf16Dim128Words[2];
extern const AttendVariant kAttendBf16Dim256Words[2];
extern const AttendVariant kAttendFp16Dim64Words[2];
extern const AttendVariant kAttendFp16Dim128Words[2];
extern const AttendVariant kAttendFp16Dim256Words[2];
extern const AttendVariant kAttendFp32Dim64Words[1];
extern const AttendVariant kAttendFp32Dim128Words[1];
extern const AttendVariant kAttendFp32Dim256Words[1];
extern const AttendVariant kAttendPackedBf16Dim64[2];
extern const AttendVariant kAttendPackedBf16Dim128[2];
extern const AttendVariant kAttendPackedBf16Dim256[1];
extern const AttendVariant kAttendPackedFp16Dim64[2];
extern const AttendVariant kAttendPackedFp16Dim128[2];
extern const AttendVariant kAttendPackedFp16Dim256[1];
extern const AttendVariant kAttendPackedInt8Dim64[2];
extern const AttendVariant kAttendPackedInt8Dim128[2];
extern const AttendVariant kAttendPackedInt8Dim256[1];
extern const AttendVariant kAttendPackedFp8Dim64[2];
extern const AttendVariant kAttendPackedFp8Dim128[2];
extern const AttendVariant kAttendPackedFp8Dim256[1];
extern const AttendVariant kAttendPlanesDim64[2];
extern const AttendVariant kAttendPlanesDim128[2];
extern const AttendVariant kAttendPlanesDim256[1];
extern const AttendVariant kAttendNearPlanesDim64[2];
extern const AttendVariant kAttendNearPlanesDim128[2];
extern const AttendVariant kAttendNearPlanesDim256[1];
// For parts of selected blocks. kDenseWords covers dense blocks of every shape.
extern const AttendVariant kAttendBf16Dim64Selected[2];
extern const AttendVariant kAttendBf16Dim128Selected[2];
extern const AttendVariant kAttendBf16Dim256Selected[2];
extern const AttendVariant kAttendFp16Dim64Selected[2];
extern const AttendVariant kAttendFp16Dim128Selected[2];
extern const AttendVariant kAttendFp16Dim256Selected[2];
extern const AttendVariant kAttendFp32Dim64Selected[1];
extern const AttendVariant kAttendFp32Dim128Selected[1];
extern const AttendVariant kAttendFp32Dim256Selected[1];
extern const AttendVariant kAttendPackedBf16Dim64Selected[2];
extern const AttendVariant kAttendPackedBf16Dim128Selected[2];
extern const AttendVariant kAttendPackedBf16Dim256Selected[1];
extern const AttendVariant kAttendPackedFp16Dim64Selected[2];
extern const AttendVariant kAttendPackedFp16Dim128Selected[2];
extern const AttendVariant kAttendPackedFp16Dim256Selected[1];
extern const AttendVariant kAttendPackedInt8Dim64Selected[2];
extern const AttendVariant kAttendPackedInt8Dim128Selected[2];
extern const AttendVariant kAttendPackedInt8Dim256Selected[1];
extern const AttendVariant kAttendPackedFp8Dim64Selected[2];
extern const AttendVariant kAttendPackedFp8Dim128Selected[2];
extern const AttendVariant kAttendPackedFp8Dim256Selected[1];
extern const AttendVariant kAttendPlanesDim64Selected[2];
extern const AttendVariant kAttendPlanesDim128Selected[2];
extern const AttendVariant kAttendPlanesDim256Selected[1];
extern const AttendVariant kAttendNearPlanesDim64Selected[2];
extern const AttendVariant kAttendNearPlanesDim128Selected[2];
extern const AttendVariant kAttendNearPlanesDim256Selected[1];

}  // namespace tessera::kernels::cuda
