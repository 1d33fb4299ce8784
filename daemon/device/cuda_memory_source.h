// Pool extents and worker memory on a GPU.
#pragma once

#include <memory>

#include "daemon/device/memory.h"
#include "daemon/platform/cuda_memory.h"

namespace tessera::device {

// `calls` must outlive the source and everything created from it.
std::unique_ptr<MemorySource> NewCudaPoolMemory(CudaCalls& calls, int ordinal, CudaSharing sharing);

absl::StatusOr<std::unique_ptr<Memory>> CreateCudaWorkerMemory(CudaCalls& calls, int ordinal,
                                                               CudaSharing sharing,
                                                               std::uint64_t bytes);

}  // namespace tessera::device
