// Marks functions that run on host and device. These headers compile with any C++20 compiler, so
// the kernels' arithmetic can be tested without a GPU.
#pragma once

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#define TESSERA_DEVICE __device__ __forceinline__
#if defined(__CUDA_ARCH__)
#define TESSERA_UNROLL _Pragma("unroll")
#define TESSERA_NO_UNROLL _Pragma("unroll 1")
#else  // nvcc's host pass forwards the pragma to a compiler that does not know it
#define TESSERA_UNROLL
#define TESSERA_NO_UNROLL
#endif
#else
#define TESSERA_HOST_DEVICE
#define TESSERA_DEVICE inline
#define TESSERA_UNROLL
#define TESSERA_NO_UNROLL
#endif
