// Launches the kernels: checks calls, sizes grids and shared memory. Every call is asynchronous on
// the given stream of the current device. It does not synchronise or allocate, and may be captured
// into a graph.
//
//   caller                   call                      consumer of the result
//   worker, each layer       LaunchAppend, then        the next layer; `fault` after the step
//                            LaunchAttend: rotate, score and select if a sequence selects, one
//                            kernel per kind of part, merge
//   daemon, Select           LaunchSelect: rotate, score, select      AttendParams::taken, ranges
//   daemon, new rows         LaunchStoreRows,          the daemon, before it publishes
//                            LaunchStoreWords
//
// Other code calls runtime.h, which owns streams and memory. A call returns cudaErrorInvalidValue
// and launches nothing if AttendCallProblem or RowsProblem finds a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/params.h"

namespace tessera::kernels::cuda {

// Properties of a GPU that the launches depend on.
struct DeviceLimits {
  std::uint32_t multiprocessors = 0;
  std::uint32_t shared_bytes_per_block = 0;  // opt-in limit
};

// Lets the kernels use their shared memory. Call it once per process and device, before the first
// launch or capture. Returns cudaErrorInvalidConfiguration if the GPU has less shared memory than
// the head_dim needs.
cudaError_t PrepareDevice(int device, DeviceLimits* limits);

cudaError_t LaunchAttend(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream);

// Selects blocks without computing attention.
cudaError_t LaunchSelect(const DeviceLimits& device, const AttendCall& call, cudaStream_t stream);

cudaError_t LaunchAppend(const AppendParams& params, cudaStream_t stream);
cudaError_t LaunchStoreRows(const StoreRowsParams& params, cudaStream_t stream);
cudaError_t LaunchStoreWords(const StoreWordsParams& params, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
