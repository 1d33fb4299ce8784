// Launching the tile operations. As in launch.h, every call is asynchronous on the stream of the
// current device, synchronises nothing, allocates nothing and may be captured into a graph. No
// kernel needs PrepareDevice: their shared memory is less than what every launch has.
//
// cudaErrorInvalidValue: a null address or an unknown head_dim; nothing was launched. Jobs are not
// looked at: tile_ops.h has the checks.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

cudaError_t LaunchEncodeTiles(const EncodeTilesParams& params, cudaStream_t stream);
cudaError_t LaunchDecodeTiles(const DecodeTilesParams& params, cudaStream_t stream);
cudaError_t LaunchKeysOfTiles(const KeysTilesParams& params, cudaStream_t stream);
cudaError_t LaunchGatherTiles(const GatherTilesParams& params, cudaStream_t stream);
cudaError_t LaunchMomentsTiles(const MomentsTilesParams& params, cudaStream_t stream);
// Two kernels for every kObservedQueries queries.
cudaError_t LaunchObserveTiles(const ObserveTilesParams& params, cudaStream_t stream);

}  // namespace tessera::kernels::cuda
