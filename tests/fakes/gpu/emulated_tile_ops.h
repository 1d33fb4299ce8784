// Launches the tile operations on the emulated GPU, as kernels/cuda/encode/tile_ops.cu does on a
// real one.
#pragma once

#include <cstdint>

#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::tests {

void EmulateEncodeTiles(const kernels::cuda::EncodeTilesParams& params, std::uint64_t seed);
void EmulateDecodeTiles(const kernels::cuda::DecodeTilesParams& params, std::uint64_t seed);
void EmulateKeysOfTiles(const kernels::cuda::KeysTilesParams& params, std::uint64_t seed);
void EmulateGatherTiles(const kernels::cuda::GatherTilesParams& params, std::uint64_t seed);
void EmulateMomentsOfRows(const kernels::cuda::MomentsTilesParams& params, std::uint64_t seed);
void EmulateObserve(const kernels::cuda::ObserveTilesParams& params, std::uint64_t seed);

}  // namespace tessera::tests
