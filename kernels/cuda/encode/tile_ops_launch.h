// Launches the tile operations. Like in launch.h, every call is asynchronous on the given stream of
// the current device, does not synchronise or allocate, and may be captured into a graph. No kernel
// needs PrepareDevice: their shared memory is within every launch's default.
//
// A call returns cudaErrorInvalidValue and launches nothing if an address is null or the head_dim
// is unknown. Jobs are not checked here; tile_ops.h checks them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

cudaError_t LaunchEncodeTiles(const EncodeTilesParams& params, cudaStream_t stream);
cudaError_t LaunchDecodeTiles(const DecodeTilesParams& params, cudaStream_t stream);
cudaError_t LaunchKeysOfTiles(const KeysTilesParams& params, cudaStream_t stream);
cudaError_t LaunchGatherTiles(const GatherTilesParams& params, cudaStream_t stream);
cudaError_t LaunchMomentsTiles(const MomentsTilesParams& params, cudaStream_t stream);
// Launches two kernels for every kObservedQueries queries.
cudaError_t LaunchObserveTiles(const ObserveTilesParams& params, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
