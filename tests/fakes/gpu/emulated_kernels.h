// Launches the CUDA kernels on the emulated GPU, as kernels/cuda/host/launch.cu does on a real one.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/params.h"
#include "kernels/cuda/host/host_batch.h"

namespace tessera::tests {

struct EmulatedGrid {
  std::uint32_t blocks_x = 4;
  std::uint32_t column_tiles =
      0;  // tensor-core kernels: 1 or 2 forces it; 0: as the launcher chooses
  std::uint64_t seed = 1;
};

void EmulateAttend(const kernels::cuda::AttendCall& call, const EmulatedGrid& grid);
// Selects blocks without attending.
void EmulateSelect(const kernels::cuda::AttendCall& call, const EmulatedGrid& grid);
void EmulateAppend(const kernels::cuda::AppendParams& params, std::uint64_t seed);
void EmulateStoreRows(const kernels::cuda::StoreRowsParams& params, std::uint64_t seed);
void EmulateStoreWords(const kernels::cuda::StoreWordsParams& params, std::uint64_t seed);

// Packs a batch, runs it and scatters the results. Returns the fault word. Defined in
// emulated_runtime.cc.
std::uint64_t EmulateHostBatch(const kernels::cuda::HostBatch& batch, const EmulatedGrid& grid);

// Runs FindLane in one warp and returns its result.
std::uint32_t EmulateFindLane(const std::uint32_t* works, std::uint32_t lanes, std::uint32_t work);

}  // namespace tessera::tests
