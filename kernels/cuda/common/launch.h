// Launching the kernels: checks, grids, shared memory. Every call is asynchronous on the stream of
// the current device, synchronises nothing, allocates nothing and may be captured into a graph.
//
//   who calls                what                      who reads the result
//   worker, each layer       LaunchAppend, then        the next layer; `fault` after the step
//                            LaunchAttend: rotate, score and select where something selects, a
//                            kernel per kind of part, merge
//   daemon, Select           LaunchSelect: rotate, score, select      AttendParams::taken, ranges
//   daemon, rows that come   LaunchStoreRows,          the daemon, before it publishes
//                            LaunchStoreWords
//
// runtime.h is what others call; it owns streams and memory. cudaErrorInvalidValue: a call that
// AttendCallProblem or RowsProblem names the fault of; nothing was launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/params.h"

namespace tessera::kernels::cuda {

// What the kernels must know of a GPU.
struct DeviceLimits {
  std::uint32_t multiprocessors = 0;
  std::uint32_t shared_bytes_per_block = 0;  // opt-in
};

// Once per process and device, before the first launch or capture: lets the kernels use their
// shared memory. cudaErrorInvalidConfiguration where the GPU has less of it than the head_dim
// needs.
cudaError_t PrepareDevice(int device, DeviceLimits* limits);

cudaError_t LaunchAttend(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream);

// The choice alone: nothing is attended over.
cudaError_t LaunchSelect(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream);

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream);
cudaError_t LaunchStoreRows(const StoreRowsParams& params, cudaStream_t stream);
cudaError_t LaunchStoreWords(const StoreWordsParams& params, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
