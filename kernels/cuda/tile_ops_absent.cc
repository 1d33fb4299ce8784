#include "kernels/cuda/tile_ops.h"

namespace tessera::kernels::cuda {

Error NewTileQueue(Runtime&, int, std::unique_ptr<TileQueue>*) {
  return Error("this build has no CUDA");
}

}  // namespace tessera::kernels::cuda
